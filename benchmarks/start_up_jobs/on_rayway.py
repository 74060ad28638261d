"""The start-up benchmark's job for ``rayway run``; seconds long, it learns nothing of use."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from stamped import STEPS, WIDTH, rows  # type: ignore[import-not-found]  # beside this file
from torch import Tensor, nn
from torch.nn import functional

from rayway import BatchSpec, DataSpec, Job, Loss, ModelSpec, OptimSpec, ScaleSpec


def prepare(folder: str) -> None:
    """Write the rows as Parquet."""
    data = rows()
    x = pa.FixedSizeListArray.from_arrays(pa.array(data["x"].numpy().ravel()), WIDTH)
    target = Path(folder, "train")
    target.mkdir(parents=True)
    pq.write_table(pa.table({"x": x, "y": data["y"].numpy()}), target / "part-0.parquet")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Cross entropy."""
    scores = model(batch["x"])
    return Loss(
        sum=functional.cross_entropy(scores, batch["y"], reduction="sum"), weight=len(scores)
    )


job = Job(
    name="start-up",
    model=ModelSpec(build="stamped:build", args={"stamps": "."}),
    loss=loss,
    data=DataSpec(train="data/train", prepare=prepare),
    batch=BatchSpec(global_batch=8),
    optim=OptimSpec(lr=1e-2, steps=STEPS),
    scale=ScaleSpec(workers=2),
)
