"""The lab: train, compare and sweep optimizers on real data (extra `lab`).

`config` holds the settings of a training, `arms` the optimizers by name. The rooms, from the bottom
up: `storage` (files), `data`, `models`, `training` (one run), `studies` (many runs), `report`
(pages from records) and `commands` (the command line).
"""
