"""Networks and LightningModules of the reference application, one file per architecture."""

from models.classifier import ClassificationModule
from models.cnn import SmallCNN

__all__ = ["ClassificationModule", "SmallCNN"]
