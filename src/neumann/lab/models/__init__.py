"""Models by name, and the loss that trains them. `build.py` has the table: add a model there."""

from neumann.lab.models.build import build, classification_loss, list_fitting_models

__all__ = ["build", "classification_loss", "list_fitting_models"]
