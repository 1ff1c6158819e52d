"""Networks and LightningModules of the reference application, one file per architecture."""

from models.classifier import ClassificationModule
from models.cnn import DeepCNN, SmallCNN
from models.resnet import ResNet
from models.wide_resnet import WideResNet

__all__ = ["ClassificationModule", "DeepCNN", "ResNet", "SmallCNN", "WideResNet"]
