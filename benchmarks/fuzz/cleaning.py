"""Deletion of what the attacker has stored, so that its quotas and the disk never fill up."""

import time

import httpx

from benchmarks.fuzz.findings import Findings, Problem
from benchmarks.fuzz.service import MALLORY, Service

_PATIENCE = 60.0
_POLL_SECONDS = 0.2
_PAGE = 100


def clean(service: Service, findings: Findings) -> None:
    """Delete the attacker's sessions; adds a finding for one that cannot be deleted."""
    headers = {"authorization": f"Bearer {service.keys[MALLORY]}"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=_PATIENCE) as client:
        delete_all(client, findings)


def delete_all(client: httpx.Client, findings: Findings, patience: float = _PATIENCE) -> None:
    """Delete all sessions of the client's tenant; wait so many seconds for one that is busy."""
    while sessions := client.get("/v1/sessions", params={"limit": _PAGE}).json()["sessions"]:
        for each in sessions:
            reply = _delete(client, each["id"], patience)
            if reply.status_code not in (204, 404):
                text = f"{each['id']}: {reply.status_code} {reply.text}"
                findings.add("cleaning", Problem("a session that cannot be deleted", text))
                return
            findings.count_other("sessions deleted")


def _delete(client: httpx.Client, session: str, patience: float) -> httpx.Response:
    """Delete a session: again while it is busy, as a response in the background keeps it."""
    last = time.monotonic() + patience
    while True:
        reply = client.delete(f"/v1/sessions/{session}")
        if reply.status_code != httpx.codes.CONFLICT or time.monotonic() >= last:
            return reply
        time.sleep(_POLL_SECONDS)
