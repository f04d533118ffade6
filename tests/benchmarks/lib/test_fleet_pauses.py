import asyncio

from benchmarks.lib.fleet import pauses


def test_a_fleet_is_paused_and_resumed_in_each_round(monkeypatch):
    made = []
    call = pauses.FleetClient.call

    async def note(self, args):
        result = await call(self, args)
        made.append((type(args).__name__, len(result["replicas"])))
        return result

    monkeypatch.setattr(pauses.FleetClient, "call", note)
    times = asyncio.run(pauses.measure(2, rounds=2, idle_s=0.01))
    assert made == [("PauseArgs", 2), ("ResumeArgs", 2)] * 2
    assert times.pause_ms > 0 and times.pause_cpu_ms > 0 and times.resume_cpu_ms > 0
