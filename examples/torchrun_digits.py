"""Train scikit-learn's digits with several processes; a few seconds on a CPU.

    torchrun --nproc-per-node 2 examples/torchrun_digits.py
    torchrun --nproc-per-node 2 examples/torchrun_digits.py --fsdp

Each process takes its share of every batch of 128. With DDP each process holds the whole model, and
the optimizer needs nothing extra. With FSDP2 (`--fsdp`) weights and optimizer state are sharded,
and the optimizer sums its distance over the shards. The result is the same.
"""

import argparse
import gc
import os

import torch
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import neumann

BATCH = 128  # over all processes
TEST = 360


def load_shuffled(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return images in [0, 1] and labels, in the same shuffled order in every process."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images / 16, dtype=torch.float32)
    return x[order].to(device), torch.tensor(labels)[order].to(device)


def train(epochs: int, fsdp: bool, device: torch.device) -> float:
    """Train, and return the test accuracy in %."""
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    x, y = load_shuffled(device)
    steps = (len(y) - TEST) // BATCH

    torch.manual_seed(0)  # the same initial weights everywhere
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    if fsdp:
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = neumann.Neumann(model.named_parameters(), lr=0.2, steps_per_epoch=steps)
    neumann.guard(model, optimizer)  # warns if you save displaced weights as the model
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=epochs * steps)

    for epoch in range(epochs):
        order = TEST + torch.randperm(len(y) - TEST, generator=torch.Generator().manual_seed(epoch))
        for batch in order[: steps * BATCH].view(steps, BATCH):
            mine = batch.chunk(processes)[rank].to(device)
            optimizer.zero_grad()
            cross_entropy(model(x[mine]), y[mine]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()

    with optimizer.evaluating(), torch.no_grad():
        correct = model(x[:TEST]).argmax(1) == y[:TEST]
    return 100 * float(correct.double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--fsdp", action="store_true", help="shard the model with FSDP2")
    arguments = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    accuracy = train(arguments.epochs, arguments.fsdp, device)
    if distributed.get_rank() == 0:
        kind = "FSDP2" if arguments.fsdp else "DDP"
        print(f"{kind} on {distributed.get_world_size()} processes: {accuracy:.2f} % correct")
    gc.collect()  # FSDP's modules would keep the process group and its threads alive
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
