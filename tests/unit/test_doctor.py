"""``gnmr doctor``: what is there is run, what is not is said, and what is broken is an exit code."""

import json
import re
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import gnmr
from gnmr import doctor
from gnmr.cli.main import app
from toys import ToyPaths

DOUBLES = Path(__file__).parents[1] / "doubles"


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})


def by_name(findings):
    return {finding.name: finding for finding in findings}


def layers():
    torch.manual_seed(0)
    return doctor._layers(torch.device("cpu"))


def test_the_paths_of_this_machine_are_proved_by_a_run():
    found = by_name(doctor.paths())

    for name in ("SavedActivations", "Simulated", "CustomPaths"):
        assert found[name].status == "ok", found[name]
        assert "ran both paths on" in found[name].detail


def test_every_packaged_backend_has_a_trial():
    backends = {name for name in gnmr._LAZY if isinstance(getattr(gnmr, name), type)}
    backends = {name for name in backends if issubclass(getattr(gnmr, name), gnmr.Paths)} - {"Paths"}

    assert set(doctor.TRIALS) == backends


def test_an_examination_leaves_random_numbers_alone():
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    doctor.paths()

    assert torch.equal(torch.rand(1), wanted)


class Stuck(ToyPaths):
    """Its switch does nothing."""

    def switch(self, unit, recover):
        pass


class Coarse(ToyPaths):
    def low(self, operator, x):
        return operator.plain(x.bfloat16().to(x.dtype))


class Upside(Coarse):
    """Its recovery path is the coarser one."""

    low, high = Coarse.high, Coarse.low


class Sticky(Coarse):
    """Leaves the weights changed."""

    def detach(self):
        for operator in self.operators:
            operator.weight.data.mul_(2)
        super().detach()


class Fails(Coarse):
    def low(self, operator, x):
        raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (Stuck, "PathError: switched to recovery, and ran on the other path"),
        (Upside, r"PathError: gradients are off by 0.0% on the low-cost path and by [1-9].\d% on recovery"),
        (ToyPaths, "PathError: gradients are off by 0.0% on the low-cost path and by 0.0%"),
        (Sticky, "PathError: the model is not what it was after"),
        (Fails, "RuntimeError: no kernel image is available"),
    ],
)
def test_a_path_that_does_not_do_its_work_is_broken(monkeypatch, paths, message):
    monkeypatch.setattr(doctor, "TRIALS", {"Mine": lambda device: doctor.Trial(paths(), layers())})
    (found,) = doctor.paths()

    assert found.status == "broken"
    assert re.search(message, found.detail), found.detail


def test_a_backend_that_cannot_be_made_here_is_missing_or_broken(monkeypatch):
    def lacks(device):
        raise ImportError("needs torchao")

    def crashes(device):
        raise OSError("libcudart.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "TRIALS", {"A": lacks, "B": crashes})
    a, b = doctor.paths()

    assert (a.status, a.detail) == ("missing", "needs torchao")
    assert (b.status, b.detail.split(":")[0]) == ("broken", "OSError")


def test_transformer_engine_is_marked_as_not_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    found = by_name(doctor.paths())["TransformerEngine"]

    assert found.status == "missing"
    assert "pip install" in found.detail
    assert found.detail.endswith("not yet run on hardware by us")


def test_its_trial_runs_in_its_own_region(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(DOUBLES)
    te = import_module("transformer_engine.pytorch")
    paths = gnmr.TransformerEngine("current")
    trial = doctor.Trial(paths, doctor._layers(torch.device("cpu"), te.Linear), paths.autocast)
    low, high = doctor.run(trial, torch.device("cpu"))
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]

    assert high == 0 < low < 0.2


@pytest.mark.parametrize(
    ("version", "status", "detail"),
    [
        ("2.13.0+cpu", "ok", "2.13.0+cpu"),
        ("2.14.0.dev20260901", "ok", "2.14.0.dev20260901"),
        ("2.20.0", "doubt", "2.20.0, tested with <2.15,>=2.13"),
        (None, "missing", "not installed; tested with <2.15,>=2.13"),
    ],
)
def test_versions_are_held_against_the_package_s_own_ranges(monkeypatch, version, status, detail):
    def installed(name):
        if version is None or name != "torch":
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(doctor, "version", installed)
    monkeypatch.setattr(
        doctor, "requires", lambda name: ["torch<2.15,>=2.13; extra == 'torch'", "gnmr[torch]", "lm_eval>=99"]
    )
    found = by_name(doctor.packages())

    assert (found["torch"].status, found["torch"].detail) == (status, detail)
    assert found["peft"].detail == "not installed; no range was tested"
    assert found["lm-eval"].detail == "not installed; tested with >=99"
    assert not {"gnmr", "lm_eval"} & set(found)


def test_the_ranges_are_those_of_the_metadata():
    found = by_name(doctor.packages())

    assert {"torch", "transformers", "accelerate", "pyarrow", "numpy", *doctor.WORKS_WITH} <= set(found)


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("OMP_WAIT_POLICY", "passive", "ok"),
        ("OMP_WAIT_POLICY", "ACTIVE", "doubt"),
        ("OMP_WAIT_POLICY", None, "doubt"),
        ("CUDA_LAUNCH_BLOCKING", "1", "doubt"),
        ("CUDA_LAUNCH_BLOCKING", None, "ok"),
    ],
)
def test_settings_that_hurt_are_doubted(monkeypatch, variable, value, status):
    monkeypatch.setattr(doctor, "_cores", lambda: 4)
    if value is None:
        monkeypatch.delenv(variable, raising=False)
    else:
        monkeypatch.setenv(variable, value)

    assert by_name(doctor.settings())[variable].status == status


def test_more_threads_than_cores_are_doubted(monkeypatch):
    monkeypatch.setattr(doctor, "_threads", lambda: 64)
    found = by_name(doctor.settings())["OMP_NUM_THREADS"]

    assert found.status == "doubt"
    assert "64 threads" in found.detail


@pytest.mark.parametrize(
    ("capability", "fp8", "mxfp8"),
    [
        ((8, 0), False, False),
        ((8, 9), True, False),
        ((9, 0), True, False),
        ((10, 0), True, True),
        ((12, 0), True, False),
    ],
)
def test_what_a_chip_has_goes_by_its_capability(monkeypatch, capability, fp8, mxfp8):
    chip = SimpleNamespace(name="NVIDIA X", total_memory=80 * 2**30, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: chip)
    (gpu,) = doctor.machine()["gpus"]

    assert (gpu["fp8"], gpu["mxfp8"]) == (fp8, mxfp8)
    assert gpu["memory_gib"] == 80
    assert gpu["capability"] == f"{capability[0]}.{capability[1]}"


def test_the_processor_s_instruction_sets(monkeypatch):
    monkeypatch.setattr(doctor, "cpu_flags", lambda: frozenset(["avx512f", "avx512_vnni"]))
    assert doctor.machine()["cpu_has"]["int8"]
    assert not doctor.machine()["cpu_has"]["int8 matrices (AMX)"]
    monkeypatch.setattr(doctor, "cpu_flags", frozenset)
    assert doctor.machine()["cpu_has"] == {}


def test_it_prints_one_screen():
    done = run()

    assert done.exit_code == 0, done.output
    assert "SavedActivations" in done.output
    assert "not yet run on hardware by us" in " ".join(re.sub("[│|]", " ", done.output).split())
    assert f"torch {torch.__version__}" in done.output
    assert len(done.output.splitlines()) < 40


def test_it_prints_json():
    found = json.loads(run("--json").output)

    assert found["faults"] == []
    assert {each["name"] for each in found["paths"]} == set(doctor.TRIALS)
    assert found["machine"]["cores"] >= 1


def test_what_is_needed_and_not_there_is_exit_code_1(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert run("savedactivations", "torch").exit_code == 0
    done = run("TransformerEngine")

    assert done.exit_code == 1
    assert "not in order: TransformerEngine" in done.output


def test_what_is_broken_is_exit_code_1_without_being_asked_for(monkeypatch):
    monkeypatch.setattr(doctor, "TRIALS", {"Mine": lambda device: doctor.Trial(Fails(), layers())})
    done = run("--json")

    assert done.exit_code == 1
    assert json.loads(done.output)["faults"] == ["Mine"]


def test_what_it_does_not_know_is_one_line():
    done = run("SaveActivations")

    assert done.exit_code == 2
    assert "did you mean 'SavedActivations'?" in done.stderr


def test_without_torch_it_still_speaks():
    code = """
import sys
sys.modules["torch"] = None
from gnmr.cli import entry
sys.argv = ["gnmr", "doctor", "--json"]
entry()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)

    assert done.returncode == 0, done.stderr
    assert {each["status"] for each in found["paths"]} == {"missing"}
    assert found["machine"]["gpus"] == []
