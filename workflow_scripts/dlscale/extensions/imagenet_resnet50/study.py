"""The study `imagenet_resnet50`: classify images with a residual network."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from dlscale.core.errors import Refused, unknown
from dlscale.core.metrics import LossInfo, Metric
from dlscale.core.schema import Extent, Strict
from dlscale.parallel.sharding import Sharding
from dlscale.studies.base import Metrics, PublishedLog, SampleLoss, Study

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from torch import nn

    from dlscale.data.manifest import Manifest

#: Classifiers of torchvision 0.15 to 0.29, listed here so that a wrong name is refused even without torchvision.
_NAMES = (
    "alexnet convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161 densenet169 densenet201 "
    "efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnet_b5 efficientnet_b6 "
    "efficientnet_b7 efficientnet_v2_l efficientnet_v2_m efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5 "
    "mnasnet0_75 mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_16gf regnet_x_1_6gf "
    "regnet_x_32gf regnet_x_3_2gf regnet_x_400mf regnet_x_800mf regnet_x_8gf regnet_y_128gf regnet_y_16gf "
    "regnet_y_1_6gf regnet_y_32gf regnet_y_3_2gf regnet_y_400mf regnet_y_800mf regnet_y_8gf resnet101 resnet152 "
    "resnet18 resnet34 resnet50 resnext101_32x8d resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5 "
    "shufflenet_v2_x1_0 shufflenet_v2_x1_5 shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t "
    "swin_v2_b swin_v2_s swin_v2_t vgg11 vgg11_bn vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32 "
    "vit_h_14 vit_l_16 vit_l_32 wide_resnet101_2 wide_resnet50_2"
)
TORCHVISION = _NAMES.split()

BEST = 5  # number of most probable classes that top-5 accuracy counts and the figure shows


def _number(value: Any) -> Any:
    """Return a string of digits as a number, since values inside a mapping in `--config` are strings."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class ResNetSettings(Strict):
    """The residual network; the data determine the number of classes."""

    kind: Literal["resnet"]
    depth: Annotated[Literal[18, 34, 50, 101], BeforeValidator(_number)] = Field(50, description="Number of layers.")
    width: Extent = Field(64, description="Channels of the first convolution; the published network has 64.")


class TorchvisionSettings(Strict):
    """Another network; the package torchvision must be installed. The data determine the number of classes."""

    kind: Literal["torchvision"]
    name: str = Field(description="Name of a classifier in torchvision, such as alexnet, vgg16 or vit_b_16.")

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in TORCHVISION:
            raise ValueError(unknown("classifier of torchvision", name, TORCHVISION))
        return name


class CrossEntropy(Strict):
    """The cross entropy."""

    kind: Literal["cross_entropy"]


class ImagenetMetrics(Metrics):
    """Top-1 and top-5 accuracy of the model, and of always answering the training data's most frequent classes."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        import numpy as np
        import torch

        from dlscale.data.store import Reader

        classes = manifest.fields["labels"].classes
        assert classes is not None
        counts = np.zeros(classes, np.int64)
        for file in manifest.files("train"):
            counts += np.bincount(Reader(manifest.path(file), "labels")[(slice(None),)], minlength=classes)
        self.most = {"top1": 1, "top5": min(BEST, classes)}
        self.frequent = torch.from_numpy(np.argsort(-counts, kind="stable")[: self.most["top5"]].copy()).to(device)

    @property
    def described(self) -> list[Metric]:
        metrics = []
        for name, count in self.most.items():
            answer = "the most frequent class" if count == 1 else f"the {count} most frequent classes"
            among = "the most probable" if count == 1 else f"among the {count} most probable"
            naive, title = f"{name}_of_most_frequent", f"top-{name[3:]} accuracy"
            meaning = f"fraction of validation images with the class {among}"
            metrics += [
                Metric(name=name, title=title, meaning=meaning, better="higher", naive=naive, answer=answer),
                Metric(name=naive, title=f"{title} of {answer}", meaning=meaning, better="higher"),
            ]
        return metrics

    def per_sample(self, x: torch.Tensor, y: torch.Tensor, prediction: torch.Tensor) -> dict[str, torch.Tensor]:
        best = prediction.topk(self.most["top5"], dim=1).indices
        answers = {"": best, "_of_most_frequent": self.frequent.expand(len(y), -1)}
        return {
            f"{name}{suffix}": (answer[:, :count] == y[:, None]).any(dim=1).float()
            for name, count in self.most.items()
            for suffix, answer in answers.items()
        }


class ImagenetResNet50(Study):
    """The study `imagenet_resnet50`."""

    dataset = "imagenet"
    Model, Loss = Annotated[ResNetSettings | TorchvisionSettings, Field(discriminator="kind")], CrossEntropy
    loss_info = LossInfo(title="cross entropy", unit="nats")
    operations = frozenset({"conv2d"})
    published_log = PublishedLog(
        {
            "Loss/train": "loss/train",
            "Loss/val": "loss/valid",
            "Top1/val": "valid/top1",
            "Top5/val": "valid/top5",
            "Top1/train": "train/top1",
            "Top5/train": "train/top5",
            "Throughput/train": "samples_per_second",
            "Throughput/val": "valid_samples_per_second",
            "Time/train": "seconds_per_step",
            "Time/val": "valid_seconds_per_step",
            "Lr": "learning_rate",
        },
        over="epoch",
        percent=frozenset({"Top1/train", "Top1/val", "Top5/train", "Top5/val"}),
    )
    train_metrics = ("top1", "top5")

    def check(self, run: Any) -> None:
        if run.model.kind == "resnet" and run.samples.size <= 32:
            raise Refused(
                f"samples.size {run.samples.size}: the network halves images five times, which leaves one pixel, so "
                "batch normalisation fails for a batch of one sample. Use at least 33"
            )

    def model(self, run: Any, manifest: Manifest) -> nn.Module:
        from dlscale.extensions.imagenet_resnet50.model import MEAN, STD, ResNet

        classes = manifest.fields["labels"].classes or 0
        if run.model.kind == "torchvision":
            from dlscale.extensions.imagenet_resnet50 import torchvision_networks

            return torchvision_networks.build(run.model.name, classes, run.samples.size)
        return ResNet(run.model.depth, classes, width=run.model.width, mean=MEAN, std=STD)

    def sharding(self, model: nn.Module) -> Sharding:
        return Sharding(units=["layer*.*"])

    def draws(self, run: Any) -> bool:
        return run.model.kind == "torchvision"  # many of these networks have drop-out or stochastic depth

    def flops(self, run: Any, manifest: Manifest) -> float | None:
        """Return the forward FLOPs of an image; None for torchvision's networks, whose operators are counted.

        A convolution takes 2 x k^2 C_in C_out FLOPs per output pixel; the linear layer takes 2 C_in K FLOPs.
        """
        from dlscale.extensions.imagenet_resnet50.model import DEPTHS

        if run.model.kind == "torchvision":
            return None
        blocks, bottleneck = DEPTHS[run.model.depth]
        width = inner = run.model.width
        edge = -(-run.samples.size // 2)  # every halving rounds up
        total = 7**2 * 3 * width * edge**2
        edge = -(-edge // 2)
        for stage, count in enumerate(blocks):
            outer = width * 2**stage
            last = 4 * outer if bottleneck else outer
            for block in range(count):
                before, edge = edge, -(-edge // 2) if stage and not block else edge
                if bottleneck:
                    total += inner * outer * before**2 + (3**2 * outer + last) * outer * edge**2
                else:
                    total += 3**2 * (inner + outer) * outer * edge**2
                if before != edge or inner != last:
                    total += inner * last * edge**2  # the shortcut
                inner = last
        return 2.0 * (total + inner * (manifest.fields["labels"].classes or 0))

    def loss(self, run: Any) -> SampleLoss:
        from dlscale.extensions.imagenet_resnet50.model import cross_entropy

        if run.model.kind == "torchvision":
            from dlscale.extensions.imagenet_resnet50.torchvision_networks import AUXILIARY, auxiliary_cross_entropy

            return partial(auxiliary_cross_entropy, weight=AUXILIARY.get(run.model.name, 0.0))
        return cross_entropy

    def train_scores(self, prediction: Any, target: torch.Tensor) -> torch.Tensor:
        import torch

        if isinstance(prediction, tuple):  # the network has auxiliary classifiers
            prediction = prediction[0]
        best = prediction.topk(min(BEST, prediction.shape[1]), dim=1).indices == target[:, None]
        return torch.stack([best[:, 0], best.any(dim=1)], dim=1).float()

    def metrics(self, run: Any, manifest: Manifest, device: torch.device) -> ImagenetMetrics:
        return ImagenetMetrics(manifest, device)

    def figure(self, run: Any, manifest: Manifest, x: Any, y: Any, prediction: Any) -> Figure:
        """Draw the image next to the most probable classes."""
        import numpy as np

        from dlscale.studies.figures import beside_bars

        names = manifest.extra["classes"]
        best = np.argsort(-prediction)[:BEST]
        probability = np.exp(prediction - prediction.max())
        probability /= probability.sum()
        title, likely = f"first validation image: {names[int(y)]}", [names[label] for label in best]
        return beside_bars(x.transpose(1, 2, 0), title, ("class", likely), probability[best], names[int(y)])


STUDY = ImagenetResNet50()
