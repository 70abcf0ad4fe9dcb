"""Models by name, and the loss that trains them. `build.py` has the table: add a model there."""

from neumann.lab.models.build import FORMS, NAMES, build, classification_loss, list_fitting_models

__all__ = ["FORMS", "NAMES", "build", "classification_loss", "list_fitting_models"]
