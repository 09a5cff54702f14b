# SPDX-License-Identifier: Apache-2.0
"""accelerate and Lightning train on this backend as one process does.

Not collected by default: `make test-frameworks` installs them (requirements-frameworks.txt) and runs this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

from test_processes import finish, launch

VENDORS = {"GPUBRIDGE_EMULATE": "cuda,cuda,hip,hip", "GPUBRIDGE_ISLAND": ""}

# One process with the whole batch; what the ranks must arrive at.
COMMON = """
from torch import nn

def network():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 5)).double()

torch.manual_seed(1)
X, Y = torch.randn(64, 12).double(), torch.randn(64, 5).double()

def alone(steps):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        rows = slice(16 * step, 16 * step + 16)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X[rows]), Y[rows]).backward()
        optimizer.step()
    return model

def same(model, want):
    for p, q in zip(model.parameters(), want.parameters()):
        assert torch.allclose(p, q, rtol=0, atol=1e-9), (p - q).abs().max()
"""

# accelerate gives the CPU to Gloo whatever it is told, but takes the process group that is there.  (On GPUs:
# InitProcessGroupKwargs(backend="gpubridge").)
ACCELERATE = """
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, dataloader_config=None)
assert accelerator.num_processes == size and dist.get_backend() == "gpubridge"
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# A batch of 4 per rank: each step's 16 rows are those of the single process.
loader = DataLoader(TensorDataset(X, Y), batch_size=16 // size, shuffle=False)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
same(accelerator.unwrap_model(model), alone(4))
assert accelerator.gather(torch.tensor([rank])).tolist() == list(range(size))
assert accelerator.gather_for_metrics({"rank": torch.tensor([rank])})["rank"].tolist() == list(range(size))
accelerator.wait_for_everyone()
print("fine")
"""

LIGHTNING = """
import pytorch_lightning as pl
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy
from torch.utils.data import DataLoader, TensorDataset

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()
    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

class Rows(torch.utils.data.Sampler):
    # Rank r gets rows r, r + size, ... of every step's 16.
    def __iter__(self):
        return iter(range(rank, len(X), size))
    def __len__(self):
        return len(X) // size

module = Module()
trainer = pl.Trainer(accelerator="cpu", devices=size, max_epochs=1, logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
                     strategy=DDPStrategy(process_group_backend="gpubridge"))
loader = DataLoader(TensorDataset(X, Y), batch_size=16 // size, sampler=Rows())
trainer.fit(module, loader)
assert dist.get_backend() == "gpubridge"
same(module.net, alone(4))
print("fine")
"""


def run(body: str, init: str) -> None:
    extra = {"TORCHELASTIC_RUN_ID": "frameworks", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0", **VENDORS}
    results = finish(launch(COMMON + body, size=4, init=init, **extra))
    assert all(code == 0 and "fine" in out for code, out, _ in results), results


def test_accelerate() -> None:
    run(ACCELERATE, 'dist.init_process_group("gpubridge")\n')


def test_lightning() -> None:
    run(LIGHTNING, "")
