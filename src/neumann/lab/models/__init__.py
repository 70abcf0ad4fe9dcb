"""Models by name, and the loss that trains them.

build          the table of models: add one there
image_models   an MLP, a CNN, ResNets for small images
text_models    a small GPT and a GRU
gpt            a modern GPT
timm_models    any image model of timm
"""

from neumann.lab.models.build import build, check_model, classification_loss, list_fitting_models

__all__ = ["build", "check_model", "classification_loss", "list_fitting_models"]
