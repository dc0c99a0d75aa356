"""Extension: residual networks that classify images."""

STUDIES = {"imagenet_resnet50": "dlscale.extensions.imagenet_resnet50.study"}
KINDS = {"imagenet": "dlscale.extensions.imagenet_resnet50.imagenet"}
