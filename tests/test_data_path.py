"""The fast ways of a batch give the numbers of the plain one: far devices, data kept there, recognised DataLoaders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Subset, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

import hapi
from hapi.data import memory, sources
from hapi.data.ahead import DeviceLoader
from hapi.data.gathered import GatheredLoader
from hapi.data.loader import Loader
from hapi.datasets import InMemoryImages
from hapi.distributed.environment import detect
from tests.helpers.nets import same_weights
from tests.helpers.ranks import run_ranks

ROWS = 42
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def images(transform: Any = None) -> InMemoryImages:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (ROWS, 1, 4, 4), dtype=torch.uint8, generator=generator)
    return InMemoryImages(pixels, torch.arange(ROWS) % 3, ["a", "b", "c"], transform)


X, Y = images().gather(slice(None))


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return X[index], int(Y[index])


def collate(samples: Any) -> Any:
    return default_collate(samples)


def noisy(image: Tensor) -> Tensor:
    return image + torch.rand(()) * np.float32(np.random.rand())


IN_MEMORY: dict[str, Any] = {
    "arrays": lambda: (X, Y),
    "numpy arrays": lambda: (X.numpy(), Y.numpy()),
    "TensorDataset": lambda: TensorDataset(X, Y),
    "images": images,
    "Subset": lambda: Subset(images(), list(range(ROWS))),
    "DataLoader": lambda: DataLoader(TensorDataset(X, Y), 8),
    "DataLoader of images": lambda: DataLoader(images(), 8),
}
OTHERS: dict[str, Any] = {
    "Dataset": Samples,
    "DataLoader of a Dataset": lambda: DataLoader(Samples(), 8),
    "list of batches": lambda: [(X[i : i + 8], Y[i : i + 8]) for i in range(0, ROWS, 8)],
}
EVERYTHING = {**IN_MEMORY, **OTHERS}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.3), nn.Linear(8, 3))


def model_of(device: str | None = "cpu") -> hapi.Model:
    network = net()
    return hapi.Model(network, device=device).prepare(
        torch.optim.Adam(network.parameters(), 0.01), "cross_entropy", "acc"
    )


def fitted(data: Any, device: str | None = "cpu", **options: Any) -> tuple[nn.Module, Any]:
    """The trained network; its history, an evaluation, a prediction, and what the generator gives next."""
    model = model_of(device)
    torch.manual_seed(5)
    options = {"batch_size": 8, "verbose": 0, "shuffle": False, "epochs": 2, "seed": 3, **options}
    how = {name: options[name] for name in ("keep_on_device", "num_workers") if name in options}
    history = model.fit(data(), images(), **options).history
    values = model.evaluate(data(), 8, verbose=0, **how)
    (outputs,) = model.predict(data(), 8, stack_outputs=True, verbose=0, **how)
    return model.network.cpu(), (history, values, outputs.tolist(), float(torch.rand(())))


def assert_same(got: tuple[nn.Module, Any], expected: tuple[nn.Module, Any]) -> None:
    assert got[1] == expected[1]
    assert same_weights(got[0], expected[0])


# ------------------------------------------------------------------------------------------- a device far away


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> str:
    """A device that hapi takes for an accelerator, and that computes as the CPU does: the CPU by a longer name."""
    for module in (memory, sources):
        monkeypatch.setattr(module, "accelerated", lambda device: device.index is not None)
    return "cpu:0"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Loader]:
    """The loaders that are opened."""
    found: list[Loader] = []

    def spy(*args: Any, **options: Any) -> Loader:
        found.append(sources.open_data(*args, **options))
        return found[-1]

    monkeypatch.setattr("hapi.model.open_data", spy)
    return found


@pytest.mark.parametrize("kind", EVERYTHING)
def test_a_far_device_sees_the_same_batches(far: str, opened: list[Loader], kind: str) -> None:
    expected = fitted(EVERYTHING[kind])
    assert not any(isinstance(loader, DeviceLoader) for loader in opened)
    opened.clear()
    assert_same(fitted(EVERYTHING[kind], far), expected)
    assert isinstance(opened[0], DeviceLoader) == (kind != "list of batches")
    assert opened[0].early == (kind in IN_MEMORY)


@pytest.mark.parametrize("kind", IN_MEMORY)
def test_kept_on_a_far_device(far: str, opened: list[Loader], kind: str) -> None:
    expected = fitted(IN_MEMORY[kind])
    opened.clear()
    assert_same(fitted(IN_MEMORY[kind], far, keep_on_device=True), expected)
    assert len(opened) == 4
    assert not any(isinstance(loader, DeviceLoader) for loader in opened)


def test_shuffled_and_kept(far: str) -> None:
    for data in (IN_MEMORY["images"], IN_MEMORY["arrays"]):
        expected = fitted(data, shuffle=True)
        assert_same(fitted(data, far, shuffle=True, keep_on_device=True), expected)
        assert_same(fitted(data, far, shuffle=True), expected)


def test_steps_of_several_batches(far: str) -> None:
    expected = fitted(images, accumulate_grad_batches=2, drop_last=True)
    for keep in (False, True):
        got = fitted(images, far, accumulate_grad_batches=2, drop_last=True, keep_on_device=keep)
        assert_same(got, expected)


def test_auto_keeps_what_fits(far: str, opened: list[Loader], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fitted(images)
    opened.clear()
    for free, kept in ((10**6, True), (1000, False)):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        assert_same(fitted(images, far, keep_on_device="auto"), expected)
        assert isinstance(opened[0], DeviceLoader) != kept
        opened.clear()


@pytest.mark.parametrize("kind", [*OTHERS, "images with a transform"])
def test_what_does_not_lie_in_memory_cannot_be_kept(far: str, kind: str) -> None:
    make = OTHERS.get(kind, lambda: images(noisy))
    with pytest.raises(ValueError, match=r"fit: train_data is .* does not lie in memory"):
        fitted(make, far, keep_on_device=True)
    with pytest.raises(ValueError, match=r"evaluate: data is .* does not lie in memory"):
        model_of(far).evaluate(make(), verbose=0, keep_on_device=True)


def test_the_program_sees_finished_batches(far: str, tmp_path: Path) -> None:
    for keep in (False, True):
        model = model_of(far)
        model.fit(images(), batch_size=8, verbose=0, keep_on_device=keep)
        assert model._example is not None
        assert model._example.args[0].dtype == torch.float32
        model.save(tmp_path / f"lenet{keep}", training=False)
        program = torch.export.load(tmp_path / f"lenet{keep}.pt2").module()
        assert program(X[:5]).shape == (5, 3)


@pytest.mark.parametrize("keep", [False, True])
def test_another_batch_size_is_tried_and_taken(far: str, keep: bool) -> None:
    class Chooses(hapi.callbacks.Callback):
        all_ranks = True

        def on_train_begin(self, logs: Any = None) -> None:
            assert self.run.trials is not None
            assert len(list(self.run.trials.losses(3, lambda step: None))) == 3
            assert self.run.trials.fits(14, 2)
            self.run.trials.use_batch_size(14)

    runs = []
    for device in ("cpu", far):
        model = model_of(device)
        torch.manual_seed(5)
        model.fit(images(), batch_size=8, verbose=0, seed=1, callbacks=Chooses(), keep_on_device=keep)
        assert model._progress.global_step == 3
        runs.append(model.network)
    assert same_weights(*runs)


@pytest.mark.parametrize("stop_at", [1, 5, 6, 8])
@pytest.mark.parametrize("kind", ["images", "DataLoader of images, shuffled", "lazy draws"])
def test_resuming_on_a_far_device(far: str, tmp_path: Path, kind: str, stop_at: int) -> None:
    """What was read early is read again."""

    class Stops(hapi.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if self.run.progress.global_step == stop_at:
                raise KeyboardInterrupt

    class Lazy(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            return (int(torch.randint(ROWS, ())) for _ in range(ROWS))

    make = {
        "images": images,
        "DataLoader of images, shuffled": lambda: DataLoader(images(), 8, shuffle=True),
        "lazy draws": lambda: DataLoader(images(), 8, sampler=Lazy(images())),
    }[kind]

    def run(device: str, **options: Any) -> nn.Module:
        model = model_of(device)
        torch.manual_seed(5)
        common = {"batch_size": 8, "epochs": 2, "verbose": 0, "seed": 3, "save_every_n_steps": 1}
        model.fit(make(), **{**common, **options})
        return model.network

    expected = run("cpu", save_every_n_steps=None)
    with pytest.raises(KeyboardInterrupt):
        run(far, save_dir=tmp_path, callbacks=Stops())
    assert same_weights(run(far, save_dir=tmp_path, resume="auto"), expected)


# ------------------------------------------------------------------------------------------------------- the CPU


@pytest.mark.parametrize("keep", [True, "auto"])
@pytest.mark.parametrize("kind", EVERYTHING)
def test_on_the_cpu_keeping_changes_nothing(kind: str, keep: Any) -> None:
    assert_same(fitted(EVERYTHING[kind], keep_on_device=keep), fitted(EVERYTHING[kind]))


@pytest.mark.parametrize("where", ["fit", "evaluate", "predict"])
def test_what_keep_on_device_can_be(where: str) -> None:
    with pytest.raises(ValueError, match=f"{where}: keep_on_device='yes'; accepted: False, True, 'auto'"):
        getattr(model_of(), where)((X, Y), verbose=0, keep_on_device="yes")
    with pytest.raises(ValueError, match=f"{where}: num_workers must be an int of at least 0 or 'auto', not 'many'"):
        getattr(model_of(), where)((X, Y), verbose=0, num_workers="many")


# --------------------------------------------------------------------------------------- recognised DataLoaders


def test_a_users_dataloader_is_recognised(opened: list[Loader]) -> None:
    fitted(lambda: DataLoader(images(), 8, shuffle=True, num_workers=2))
    assert isinstance(opened[0].source, GatheredLoader)  # type: ignore[attr-defined]
    fitted(lambda: DataLoader(images(), 8, collate_fn=collate))
    assert isinstance(opened[-1].source, DataLoader)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dataset", [images, lambda: TensorDataset(X, Y)], ids=["images", "TensorDataset"])
def test_a_recognised_dataloader_trains_as_another(dataset: Any) -> None:
    how: dict[str, Any] = {"batch_size": 8, "shuffle": True, "drop_last": True}
    expected = fitted(lambda: DataLoader(dataset(), collate_fn=collate, **how), epochs=3)
    assert_same(fitted(lambda: DataLoader(dataset(), **how), epochs=3), expected)


def rank_fits(kind: str, fast: bool) -> Any:
    dataset = images()
    how: dict[str, Any] = {} if fast else {"collate_fn": collate}
    if kind == "cut":
        data = DataLoader(dataset, 4, shuffle=True, **how)
    elif kind == "cut, in order":
        data = DataLoader(TensorDataset(X, Y), 4, **how)
    elif kind == "dealt":
        data = DataLoader(dataset, batch_sampler=Shuffled(), **how)
    else:
        env = detect()
        data = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, env.world, env.rank), **how)
    trained = fitted(lambda: data)
    assert isinstance(getattr(data, "_iterator", None), type(None))
    return trained[0].state_dict(), trained[1]


class Shuffled(BatchSampler):
    def __init__(self) -> None:
        super().__init__(RandomSampler(range(ROWS)), 4, False)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cut", "cut, in order", "dealt", "distributed sampler"])
def test_recognised_on_several_ranks(kind: str) -> None:
    fast, plain = run_ranks(rank_fits, 2, kind, True), run_ranks(rank_fits, 2, kind, False)
    for (weights, told), (expected, same) in zip(fast, plain, strict=True):
        assert told == same
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def far_fits(device: str, keep: bool) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for module in (memory, sources):
            patch.setattr(module, "accelerated", lambda device: device.index is not None)
        trained = fitted(
            lambda: Subset(images(), (list(range(ROWS)) + list(range(7)))), device, shuffle=True, keep_on_device=keep
        )
    return trained[0].state_dict(), trained[1]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_far_device_on_several_ranks() -> None:
    """Global batches of 24, the third of one row: two ranks have none."""
    expected = run_ranks(far_fits, 3, "cpu", False)
    for keep in (False, True):
        for (weights, told), (plain, same) in zip(run_ranks(far_fits, 3, "cpu:0", keep), expected, strict=True):
            assert told == same
            assert all(torch.equal(weights[name], plain[name]) for name in plain)


# ------------------------------------------------------------------------------------------------------- workers


class Noisy(Samples):
    def __getitem__(self, index: int) -> Any:
        return noisy(X[index]), int(Y[index])


@pytest.mark.parametrize("data", [Noisy, lambda: images(noisy)], ids=["Dataset", "images with a transform"])
def test_results_do_not_depend_on_the_number_of_workers(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fitted(data, shuffle=True)
    assert_same(fitted(data, shuffle=True, num_workers=1), expected)
    asked: list[Any] = []

    def choose(*args: Any) -> int:
        asked.append(args[1:])
        return 2

    monkeypatch.setattr(sources, "choose_workers", choose)
    assert_same(fitted(data, shuffle=True, num_workers="auto"), expected)
    assert asked == [(8, ROWS, 1)] * 3  # the evaluation data lies in memory


@pytest.mark.parametrize("kind", EVERYTHING)
def test_auto_starts_nothing_for_what_is_cheap_or_not_read_by_hapi(kind: str, opened: list[Loader]) -> None:
    assert_same(fitted(EVERYTHING[kind], num_workers="auto"), fitted(EVERYTHING[kind]))
    assert not any(getattr(loader, "torch_loader", None) for loader in opened)


# ------------------------------------------------------------------------------------------------------ on a GPU


@gpu
@pytest.mark.parametrize("keep", [False, True, "auto"])
@pytest.mark.parametrize("kind", IN_MEMORY)
def test_on_a_gpu_all_ways_train_alike(kind: str, keep: Any) -> None:
    expected = fitted(lambda: [(X[i : i + 8], Y[i : i + 8]) for i in range(0, ROWS, 8)], "cuda")
    assert_same(fitted(IN_MEMORY[kind], "cuda", keep_on_device=keep), expected)


@gpu
@pytest.mark.parametrize(
    "put", [lambda: (X.cuda(), Y.cuda()), lambda: Subset(TensorDataset(X.cuda(), Y.cuda()), range(ROWS))]
)
def test_on_a_gpu_data_that_lies_there(put: Any) -> None:
    assert_same(fitted(put, "cuda", shuffle=True), fitted(images, "cuda", shuffle=True))
