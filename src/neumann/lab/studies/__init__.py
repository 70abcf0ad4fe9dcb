"""Studies: many runs of the training loop, and what they show.

settings       what a comparison, a sweep and a spectrum measurement are
engine         arms at every point of some axes, tuned, then tested: what all commands run
study_toml     a study as a TOML file
comparison     run several optimizers over the same seeds
lr_sweep       choose a learning rate for each optimizer, then compare them
workers        the processes in which runs train side by side
study_files    the files that describe a study on disk
results        read a comparison back and summarize each arm
statistics     confidence intervals and paired tests
rounding       the digits of a mean and its interval
wording        what a comparison has found, in sentences
spectrum_measurement   measure the curvature of a checkpoint, or of a user's model
"""
