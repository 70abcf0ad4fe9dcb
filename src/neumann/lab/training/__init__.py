"""One run: from a resolved config to a folder of records and checkpoints.

`loop` is the run itself. It uses `inputs` (data), `network` and `batchnorm_layers` (the model
as it trains), `gradients`, `evaluation` and `curvature` (what a step or an epoch computes),
`running_loss`, `clock` and `lines` (what it reports), `records`, `checkpoints` and `random_state`
(what it saves), `processes` (several that train together) and `signals` (stopping).
"""
