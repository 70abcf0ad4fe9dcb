"""A study file that trains in seconds: one optimizer, three learning rates, two seeds."""

STUDY = """
[settings]
data = "digits"
epochs = 1
batch_size = 256
device = "cpu"
[arms.sgd]
lr = "0.1:0.4:3"
{more}
[tuning]
[test]
seeds = {seeds}
"""


def write_study(path, more="", seeds=2):
    """Write it, with more lines after the arm."""
    path.write_text(STUDY.format(more=more, seeds=seeds))
    return path
