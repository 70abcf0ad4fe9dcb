"""One run: from a resolved config to a folder of records and checkpoints.

loop               the run itself
learner            what it trains: model, data and optimizer, and how they take a step
inputs             opens the data set
network            the model as it trains: compiled, sharded, on its device
batchnorm_layers   BatchNorm over several processes, and over parts of a batch
gradients          what a step computes: forward, backward, accumulation, CUDA graphs
inner_loops        steps that use one mini-batch several times
weight_average     a moving average of the weights, to be evaluated in their place
evaluation         loss and accuracy on held-out data
curvature          the ends of the Hessian's spectrum, measured along the run
running_loss       the loss since the last report
clock              seconds of training, without evaluation
lines              the lines of metrics.jsonl, and what is printed
records            the run's folder: config, metrics, summary
environment        the code, packages and hardware that a run depends on
checkpoints        writes and loads checkpoints
random_state       the random generators, saved and restored
resuming           whether a checkpoint belongs to this run
processes          several processes that train together
signals            stops at the end of a step when asked to
"""
