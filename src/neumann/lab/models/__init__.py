"""Models by name, and the loss they are trained with."""

from neumann.lab.models.build import FORMS, NAMES, build, fitting
from neumann.lab.models.loss import classification_loss

__all__ = ["FORMS", "NAMES", "build", "classification_loss", "fitting"]
