"""Deletion of what the attacker has stored, so that its quotas and the disk never fill up."""

import httpx

from benchmarks.fuzz.findings import Findings, Problem
from benchmarks.fuzz.service import MALLORY, Service

_PATIENCE = 60.0
_PAGE = 100


def clean(service: Service, findings: Findings) -> None:
    """Delete the attacker's sessions; adds a finding for one that cannot be deleted."""
    headers = {"authorization": f"Bearer {service.keys[MALLORY]}"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=_PATIENCE) as client:
        while sessions := client.get("/v1/sessions", params={"limit": _PAGE}).json()["sessions"]:
            for each in sessions:
                reply = client.delete(f"/v1/sessions/{each['id']}")
                if reply.status_code not in (204, 404):
                    text = f"{each['id']}: {reply.status_code} {reply.text}"
                    findings.add("cleaning", Problem("a session that cannot be deleted", text))
                    return
                findings.count_other("sessions deleted")
