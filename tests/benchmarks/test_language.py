"""The language benchmarks: every arm trains, all see the same batches, and the search is right."""

import argparse
import itertools
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.common.ledger import Ledger, Runner
from benchmarks.language import (
    lr_by_width,
    search_space,
    speed_table,
    state_precision,
    throughput,
    tune_recipe,
    tune_roles,
)
from benchmarks.language.contest_rules import MIDDLE
from benchmarks.language.language_arms import ARMS, Setting, build_arm, make_recipe
from benchmarks.language.language_runs import (
    LanguageTrainer,
    RunKey,
    create_language_parser,
    cut_windows,
    draw_batches,
    open_language_runner,
)
from benchmarks.language.language_variants import build_variant
from neumann.lab.data.windows import Windows
from neumann.lab.models.gpt import ModernGPT, Size
from neumann.lab.optimizers.role_rates import collect_roles
from neumann.optim.groups import param_groups
from neumann.optim.preconditioners import Diagonal
from neumann.optim.recipe import LR, large_batch
from tests.support.texts import make_documents, write_documents


def make_model(width=16):
    torch.manual_seed(0)
    return ModernGPT(32, 8, Size(width, 1, 2))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    path = write_documents(folder / "pages.txt", make_documents(60))
    return LanguageTrainer(f"text:{path}", None, "bytes", "cpu")


def make_key(arm, seed=0, **setting):
    return RunKey(
        "test", "gpt:width=16,depth=1,heads=2", 16, 128, 5, Setting(arm, 0.01, **setting), seed
    )


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains_and_repeats_itself(trainer, arm):
    if arm.startswith("muon") and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon before 2.9")
    first = trainer.train(make_key(arm, cooling=0.5 if arm == "spectral" else 0.0))
    assert first["losses"][-1] < first["losses"][0]
    again = trainer.train(make_key(arm, cooling=0.5 if arm == "spectral" else 0.0))
    assert again["loss"] == first["loss"]  # the network was filled anew


def test_another_text_of_the_same_name_does_not_continue_a_ledger(tmp_path):
    path, results = tmp_path / "pages.txt", tmp_path / "runs.jsonl"
    words = ["--data", f"text:{path}", "--tokens", "bytes", "--device", "cpu"]
    arguments = create_language_parser("", results).parse_args(words)
    write_documents(path, make_documents(60))
    ledger, runner = open_language_runner(arguments)
    assert runner.finish(make_key("adamw"))["data_hash"]
    write_documents(path, make_documents(61))
    _, later = open_language_runner(arguments)
    with pytest.raises(SystemExit, match="name another --results"):
        later.finish(make_key("adamw", seed=1))
    ledger.refresh()
    assert len(ledger.runs) == 1


def test_every_window_counts_for_the_loss(trainer):
    """Also those of a last part that is smaller than a batch."""
    model, compute_loss, dataset = trainer.prepare(make_key("adamw"))
    optimizer = build_arm(model, Setting("adamw", 0.01), 5)
    windows = cut_windows(dataset.test)
    micro = next(size for size in range(2, 9) if len(windows) % size)
    alone = [compute_loss(each[None, :-1], each[None, 1:]).item() for each in windows]
    found = trainer._evaluate(compute_loss, optimizer, dataset.test, micro)
    assert found == pytest.approx(sum(alone) / len(alone), rel=1e-5)


@pytest.mark.slow
def test_the_cooldown_of_a_setting_is_that_of_the_lead(trainer):
    """A power of the setting, and the wrapper that changes the rates of a straight line."""
    own = trainer.train(make_key("recipe", power=0.5))
    wrapped = trainer.train(make_key("recipe", lead="power cooldown", strength=0.5))
    assert own["loss"] == pytest.approx(wrapped["loss"], rel=1e-5)
    assert own["loss"] != trainer.train(make_key("recipe"))["loss"]


def test_a_run_with_a_lead(trainer):
    plain = trainer.train(make_key("recipe"))
    led = trainer.train(make_key("recipe", lead="fixed norm", strength=1.0))
    assert led["loss"] != plain["loss"]
    assert led["losses"][0] == plain["losses"][0]


@pytest.mark.parametrize("arm", ["recipe", "muon by norm"])
def test_a_run_with_slow_momentum(trainer, arm):
    if arm != "recipe" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon before 2.9")
    plain, slow = (trainer.train(make_key(arm, slow=share)) for share in (0.0, 0.6))
    assert slow["loss"] is not None
    assert plain["losses"][0] == slow["losses"][0]
    assert plain["loss"] != slow["loss"]
    with pytest.raises(ValueError, match="cannot have slow momentum beside it"):
        trainer.train(make_key(arm, slow=0.6, lead="cautious decay", strength=1.0))


def test_slow_momentum_of_the_contest_is_the_option_that_users_have():
    model = make_model()
    built = build_variant(model, make_key("recipe", slow=0.6).setting, 200)
    shipped, _ = large_batch(model, 200, slow_momentum=0.6)
    for ours, theirs in zip(built.param_groups, shipped.param_groups, strict=True):
        assert ours["precondition"].before == theirs["precondition"].before


def test_state_in_bfloat16_beside_float32(tmp_path, capsys):
    model = make_model()
    optimizer = build_arm(model, state_precision.make_key("bfloat16").setting, steps=500)
    assert optimizer.state[model.layers[0].forward_in.weight]["iterate"].dtype == torch.bfloat16
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    for seed in state_precision.SEEDS:
        for state, loss in (("float32", 2.0), ("bfloat16", 2.001)):
            ledger.add(state_precision.make_key(state, seed), {"loss": loss + 0.1 * seed})
    state_precision.print_table(ledger)
    assert "| bfloat16 | 2.2010 | 0.4000 | 5 | +0.0010 [" in capsys.readouterr().out


def test_arms_take_turns_for_their_speed(trainer):
    key = make_key("adamw")
    arms = speed_table.ARMS
    slow = dict.fromkeys(("recipe", "muon by norm", "normuon by norm"), 0.6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the arms share their weights
        speeds, missing = throughput.measure(trainer, key, arms, rounds=2, slow=slow)
    assert not missing
    assert {arm: len(found) for arm, found in speeds.items()} == dict.fromkeys(arms, 2)
    assert all(speed > 0 for found in speeds.values() for speed in found)


def test_speeds_are_compared_within_a_round():
    speeds = {"adamw": [100.0, 50.0, 200.0], "muon": [90.0, 45.0, 200.0]}
    assert speed_table.find_ratios(speeds) == {"adamw": 1.0, "muon": 0.9}
    assert "| Muon (RMS of AdamW) | 90 | 0.900 |" in speed_table.format_speeds(speeds)


def test_every_arm_is_timed_with_the_slow_momentum_that_it_has_in_the_contest(
    trainer, contest, monkeypatch
):
    """What an earlier measurement lacks is named."""
    slow = speed_table.find_slow_shares(contest)
    for arm in ("recipe", "muon by norm", "normuon by norm"):
        assert slow.get(arm, 0.0) == contest.searches.rank_settings(arm, MIDDLE, 200)[0].slow
    assert slow
    built = {}

    def build(model, setting, steps):
        built[setting.arm] = setting.slow
        return build_variant(model, setting, steps)

    monkeypatch.setattr(throughput, "build_variant", build)
    arms = ("recipe", "normuon by norm", "adamw")
    shares = {"recipe": 0.3, "normuon by norm": 0.6}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the arms share their weights
        throughput.measure(trainer, make_key("adamw"), arms, rounds=1, slow=shares)
    assert built == {"adamw": 0.0, **shares}


def test_the_table_of_speeds_names_what_was_not_measured(contest, monkeypatch):
    shares = {"recipe": 0.6, "muon by norm": 0.3}
    monkeypatch.setattr(speed_table, "find_slow_shares", lambda contest: shares)
    speeds = {arm: [100.0] for arm in speed_table.ARMS}
    earlier = {name: found for name, found in speeds.items() if name != "normuon by norm"}
    text = speed_table.describe_speeds({"tokens_per_second": earlier}, contest)
    assert "Not measured: NorMuon (by norm)." in text
    assert text.endswith("slow momentum that the best setting in the contest has: Muon (by norm).")
    today = speed_table.describe_speeds({"tokens_per_second": speeds, "slow": shares}, contest)
    assert today == speed_table.format_speeds(speeds)


def test_roles_have_their_own_rates():
    model = make_model()
    for arm in ("spectral", "diagonal", "adamw", "normuon", "soap", "schedule-free", "paper"):
        setting = Setting(arm, 0.5, decay=0.25, embedding=2.0, output=4.0)
        optimizer = build_arm(model, setting, steps=20)
        rates, decays = {}, {}
        for group in optimizer.param_groups:
            scale = {"spectral": 5, "diagonal": 1}.get(arm)
            scale = 1 if scale is None else scale * group["precondition"].scale
            for p in group["params"]:
                rates[p], decays[p] = group["lr"] * scale, group["weight_decay"]
        roles = collect_roles(model)
        for role, rate, decay in (("hidden", 0.5, 0.25), ("embedding", 1, 0), ("output", 2, 0.25)):
            assert {rates[p] for p in roles[role]} == {rate}, (arm, role)
            assert {decays[p] for p in roles[role]} == {decay}, (arm, role)


@pytest.mark.parametrize(("width", "rate"), [(16, 32 * 0.2), (32, 16 * 0.2)])
def test_by_norm_the_output_rate_falls_with_the_width(width, rate):
    optimizer = build_arm(make_model(width), Setting("spectral by norm", 0.5), steps=20)
    (output,) = (group for group in optimizer.param_groups if group["role"] == "output")
    assert output["precondition"].scale == pytest.approx(rate)


def test_the_recipe_arm_is_the_recipe():
    model = make_model()
    arm = build_arm(model, make_recipe(LR, 0.1), steps=10)
    groups = param_groups(model, weight_decay=0.1)
    for ours, expected in zip(arm.param_groups, groups, strict=True):
        assert ours["precondition"] == expected["precondition"]
        assert ours["weight_decay"] == expected["weight_decay"]


def test_lr_by_width_brackets_the_best_rate(tmp_path, capsys):
    """On invented losses with their minimum at 4 times the starting rate of every arm."""
    ledger = Ledger(tmp_path / "runs.jsonl", RunKey)
    arguments = argparse.Namespace(
        arms=["recipe", "muon"], sizes=[(16, 1)], steps=3, batch_tokens=64
    )

    def lose(key):
        start = lr_by_width.START[key.setting.arm].lr
        return {"loss": (torch.tensor(key.setting.lr / start).log2().item() - 2) ** 2}

    runner = Runner(ledger, lose)
    assert [lr_by_width.tune(arguments, runner, arm, (16, 1)) for arm in arguments.arms] == [2, 2]
    lr_by_width.print_table(arguments, ledger)
    table = capsys.readouterr().out
    assert "| recipe | 16 | 1 | 0.12 |" in table
    assert "| muon | 16 | 1 | 0.064 |" in table


def test_muon_by_norm_slows_layers_with_many_inputs():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon before 2.9")
    model = make_model()
    optimizer = build_arm(model, Setting("muon by norm", 0.5), steps=20)
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[model.layers[0].forward_in.weight] == 0.5
    assert rates[model.layers[0].forward_out.weight] == 0.25  # 16 outputs, 64 inputs


def test_the_data_order_depends_on_the_seed_alone():
    source = Windows(torch.arange(100, dtype=torch.int16), 9)

    def draw(seed):
        return torch.stack(list(itertools.islice(draw_batches(source, 4, seed), 6)))

    batches = draw(1)
    assert batches.shape == (6, 4, 10)
    assert torch.equal(batches, draw(1))
    assert not torch.equal(batches, draw(2))
    assert (batches.diff(dim=-1) == 1).all()
    assert len(set(batches[:2, :, 0].flatten().tolist())) == 8  # one pass repeats no window
    assert cut_windows(source)[:, 0].tolist() == list(range(0, 99, 9))


def test_the_search_ends_where_no_coordinate_helps(tmp_path):
    """On a bowl whose rates interact, through the ledger and back."""
    arguments = argparse.Namespace(
        model="m", batch_tokens=1, steps=1, coordinates=("output", "lr", "decay"), sweep=["decay"]
    )

    def lose(key):
        s = key.setting
        hidden, output = torch.tensor([s.lr, s.lr * s.output]).log2().tolist()
        best = torch.tensor([0.016, 0.002]).log2().tolist()
        a, b = hidden - best[0], output - best[1]
        return {"loss": a * a + b * b + 0.5 * a * b + (s.decay - 0.4) ** 2}

    runner = Runner(Ledger(tmp_path / "runs.jsonl", RunKey), lose)
    found = tune_roles.search(arguments, runner, "spectral")
    assert (found.lr, found.lr * found.output, found.decay) == (0.016, 0.002, 0.4)
    assert found.lr * found.embedding == search_space.START["spectral"]["embedding"]
    around = {key.setting.decay for key in runner.ledger.runs if key.setting.lr == found.lr}
    assert around == set(search_space.GRIDS["decay"])


def test_a_search_around_the_recipe_holds_lr_decay_steps(tmp_path, capsys):
    """Decay follows lr, and a sweep trains every value around the best point."""
    size = {"model": "m", "batch_tokens": 1, "steps": 10, "seed": 0, "rows": 1}
    moves = {"coordinates": ["lr"], "start": [("forgetting", 2.5)], "sweep": ["output_before"]}
    arguments = argparse.Namespace(**size, **moves)

    def lose(key):
        assert key.setting.lr * key.setting.decay * 10 == pytest.approx(2.5)
        return {"loss": abs(key.setting.lr - 0.06) + (key.setting.output_before or 0)}

    runner = Runner(Ledger(tmp_path / "runs.jsonl", RunKey), lose)
    assert tune_recipe.tune(arguments, runner)["lr"] == 0.06
    around = {key.setting.output_before for key in runner.ledger.runs if key.setting.lr == 0.06}
    assert around == {None, 0.8, 0.9, 0.95}
    tune_recipe.print_table(arguments, runner.ledger)
    assert "| 0.0000 | 0.06 | 2.5 |" in capsys.readouterr().out


def test_the_recipe_takes_eps_from_the_setting():
    optimizer = build_arm(make_model(), replace(make_recipe(LR, 0.1), eps=1e-5), 10)
    found = [group["precondition"] for group in optimizer.param_groups]
    assert {p.eps for p in found if isinstance(p, Diagonal)} == {1e-5}


def test_the_published_runs_can_be_read(capsys):
    path = Path(__file__).parents[2] / "results/language/roles.jsonl"
    ledger = Ledger(path, RunKey)
    assert len(ledger.runs) > 80
    arguments = argparse.Namespace(
        model="gpt:small", batch_tokens=131_072, steps=200, arms=["spectral"], rows=1
    )
    tune_roles.print_table(arguments, ledger)
    assert "| spectral | 1.9666 |" in capsys.readouterr().out
