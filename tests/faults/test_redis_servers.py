"""The servers that faults and tests start are those that their names say."""

import subprocess

import pytest

from faults.rig.redis_servers import KINDS, PACKAGED, VARIABLE, find_server


@pytest.mark.parametrize("kind", PACKAGED)
def test_a_packaged_server_has_the_name_and_the_version_of_its_kind(kind: str) -> None:
    name, version = kind.split("-")
    said = subprocess.run(
        [find_server(kind), "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith(f"{name.capitalize()} server v={version}.")


def test_the_environment_names_another_server_by_its_kind_or_its_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set(PACKAGED) <= set(KINDS)
    monkeypatch.setenv(VARIABLE, "valkey-9")
    assert find_server() == PACKAGED["valkey-9"]
    monkeypatch.setenv(VARIABLE, PACKAGED["redis-8"])
    assert find_server() == PACKAGED["redis-8"]
    monkeypatch.setenv(VARIABLE, "redis-5")
    with pytest.raises(ValueError, match=r"'redis-5'; expected one of redis-6, redis-8, valkey-9"):
        find_server()
