"""The build for a machine depends on its driver and cards, and comes with a reason."""

import itertools

from launchers.torch_builds import ENDED, Machine, build_for, ended, misfit, nearest
from tests.harness.machines import DESKTOP, changed
from tests.harness.runs import ROOT
from vae.checks.facts import Card, LoadedTorch, Smi
from vae.checks.machine import read_requirements, satisfies
from vae.checks.table import suggested_here

BLACKWELL, HOPPER, ADA, VOLTA, PASCAL, KEPLER = (12, 0), (9, 0), (8, 9), (7, 0), (6, 1), (3, 7)


def machine(driver: int, *capabilities) -> Machine:
    return Machine(driver, tuple((f"card {capability}", capability) for capability in capabilities))


def test_auto_selects_the_newest_supported_build():
    for driver, capability, build in (
        (595, BLACKWELL, "cu130"),
        (579, BLACKWELL, "cu128"),
        (570, HOPPER, "cu128"),
        (525, ADA, "cu126"),
        (580, VOLTA, "cu126"),  # 12.8 and newer end at compute capability 7.5
        (580, PASCAL, "cu126"),
        (580, KEPLER, "cpu"),
        (470, ADA, "cpu"),
        (580, None, "cu130"),  # nvidia-smi does not report the capability
    ):
        found, reason = build_for(machine(driver, capability), "linux")
        assert found == build, (driver, capability)
        assert f"driver {driver}" in reason or "compute capability 3.7" in reason


def test_check_compatibility_suggests_the_build_of_auto():
    drivers = (525, 569, 570, 580, 610)
    sets = ((BLACKWELL,), (HOPPER,), (VOLTA,), (KEPLER,), (PASCAL, BLACKWELL), ())
    systems = (("Linux", "linux"), ("Windows", "win32"))
    for driver, capabilities, (system, platform) in itertools.product(drivers, sets, systems):
        cards = tuple(Card(str(capability), capability) for capability in capabilities)
        smi = Smi("answered", "", f"{driver}.10", cards)
        missing = LoadedTorch(installed=False)
        suggested = suggested_here(changed(DESKTOP, loaded=missing, smi=smi, host={"system": system}))
        build, reason = build_for(Machine.of(smi), platform)
        assert suggested == build or (suggested is None and "update to 580" in reason), (driver, cards)


def test_auto_without_an_nvidia_driver():
    assert build_for(None, "linux")[0] == "cpu"
    assert build_for(None, "win32")[0] == "cpu"
    assert build_for(None, "darwin")[0] == "index"


def test_reason_contains_driver_updates_and_unsupported_cards():
    build, reason = build_for(machine(560, BLACKWELL), "linux")
    assert build == "cu128"  # works after the driver update
    assert "update to 580" in reason
    build, reason = build_for(machine(580, PASCAL, BLACKWELL), "linux")
    assert build == "cu130"
    assert "no code for card (6, 1)" in reason


def test_machine_from_nvidia_smi():
    cards = (Card("NVIDIA GeForce RTX 5090", BLACKWELL), Card("odd name"))
    names = (("NVIDIA GeForce RTX 5090", BLACKWELL), ("odd name", None))
    assert Machine.of(Smi("answered", "", "575.51.03", cards)) == Machine(575, names)
    for smi in (Smi("missing"), Smi("hanging", "no answer"), Smi("answered", "No devices were found")):
        assert Machine.of(smi) is None


def test_ended_builds_are_unsupported_and_suggest_the_nearest():
    supported = dict(read_requirements(ROOT))["torch"]
    for build, (name, last) in ENDED.items():
        assert not satisfies(last, supported)
        assert name in ended(build, None)
        assert "--torch cu126" in ended(build, None)
    assert nearest(machine(580, BLACKWELL)) == "cu128"
    assert nearest(machine(580, PASCAL)) == "cu126"


def test_misfit_of_driver_or_card():
    assert "no code for card (12, 0)" in misfit("cu126", machine(580, BLACKWELL))
    assert "driver 580 or newer" in misfit("cu130", machine(570, BLACKWELL))
    assert misfit("cu128", machine(570, BLACKWELL)) is None
    assert misfit("cu130", None) is None  # the environment may be for another machine
    assert misfit("cpu", machine(470, KEPLER)) is None
