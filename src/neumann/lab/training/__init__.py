"""One run: from a resolved config to a folder of records and checkpoints.

`loop` is the run itself. It uses `inputs` (data), `network` (the model as it trains), `gradients`,
`evaluation`, `curvature`, `metrics` (running sums, clock, TensorBoard), `records` and `checkpoints`
(files), `processes` (several of them) and `signals` (stopping).
"""
