"""Variables of the environment: unknown ones are refused with the nearest name."""

import pytest

from kvrecall_server.app.errors import UnknownVariable
from kvrecall_server.app.start.environment import check_environment, iter_variables


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KVRECALL_SLOTS", "KVRECALL_WORKER__SLOTS"),
        ("KVRECALL_SLOT", "KVRECALL_WORKER__SLOTS"),
        ("KVRECALL_BUDGET", "KVRECALL_WORKER__MAX_BUDGET"),
        ("KVRECALL_BLOCK", "KVRECALL_WORKER__BLOCK_TOKENS"),
        ("KVRECALL_RAM", "KVRECALL_RAM_BYTES"),
        ("KVRECALL_WORKER_SLOTS", "KVRECALL_WORKER__SLOTS"),
        ("KVRECALL_WORKER__SLOT", "KVRECALL_WORKER__SLOTS"),
        ("KVRECALL_STORE__NVM_BYTES", "KVRECALL_STORE__NVME_BYTES"),
        ("KVRECALL_MODLE", "KVRECALL_MODEL"),
        ("kvrecall_loglevel", "KVRECALL_LOG_LEVEL"),
        ("KVRECALL_WORKER_TOKEN", "KVRECALL_WIRE__TOKEN"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_one_that_is_meant(name: str, meant: str) -> None:
    with pytest.raises(UnknownVariable, match=rf"^{name} is no setting.* did you mean {meant}\?"):
        check_environment({name: "3"})


def test_a_name_that_resembles_none_is_refused_as_well() -> None:
    with pytest.raises(UnknownVariable, match="kvrecall config"):
        check_environment({"KVRECALL_XYZ": "1"})


def test_every_setting_and_what_is_none_of_ours_is_known() -> None:
    others = {"PATH": "/bin", "KVRECALL_CACHE": "/tmp", "KVRECALL_FAULTS_ROOTS": "/"}
    check_environment({**dict.fromkeys(iter_variables(), "1"), **others})


def test_what_kubernetes_says_of_a_service_of_our_name_is_no_setting() -> None:
    check_environment(
        {
            "KVRECALL_GATEWAY_SERVICE_HOST": "10.0.0.1",
            "KVRECALL_GATEWAY_SERVICE_PORT_HTTP": "8420",
            "KVRECALL_GATEWAY_PORT": "tcp://10.0.0.1:8420",
            "KVRECALL_GATEWAY_PORT_8420_TCP_ADDR": "10.0.0.1",
        }
    )
