"""Memory over a long conversation: a bounded number of active rows, all others evicted."""

PAGE = 64


def test_active_rows_are_flat_and_evicted_rows_grow(client, new_session, say) -> None:
    session = new_session(budget=128, method="snapkv", repair_rows=32)
    held = []
    for number in range(6):
        messages = [say.user(say.chatter(100 + number, 40))]
        turn = client.turn(session, messages, max_tokens=6, stop=["<tool_call>"])
        held.append(client.memory(session))
        assert turn.memory.length == held[-1].length
    assert held[-1].length > 3000
    for memory in held:
        assert memory.peak_rows <= memory.bound_rows == 128 + 64
        # Those of tokens behind the last whole page come back with the next turn.
        assert 96 - PAGE < memory.active_rows <= 128 - 32
        assert max(memory.layer_active_rows) == memory.active_rows
        # Every head keeps sinks and window; a token counts as evicted if one head evicted it.
        assert memory.length - PAGE - 96 <= memory.evicted_rows <= memory.length - 4
    evicted = [memory.evicted_rows for memory in held]
    assert evicted == sorted(set(evicted))
    assert held[-1].active_bytes < 2 * held[0].active_bytes


def test_a_repair_fills_its_reserve_and_the_end_of_the_turn_empties_it(
    client, new_session, say
) -> None:
    session = new_session(budget=128, method="snapkv", repair_rows=32)
    client.turn(session, [say.user(say.chatter(9, 30))], generate=False)
    asked = client.turn(session, [say.asks("c1", name="Ada", thing="locker")], generate=False)
    say.until(lambda: client.memory(session).promoted_rows == 32, "the early repair")
    memory = client.memory(session)
    assert asked.memory.active_rows < memory.active_rows <= 128
    client.event(session, "tool_call.completed", "c1", result="Number 4821.")
    sampling = {"max_tokens": 6, "stop": ["<tool_call>"]}
    answer = client.turn(session, [], wait_for_repairs=True, **sampling)
    assert [repair.trigger for repair in answer.memory.repairs] == [
        "tool_call",
        "tool_result",
    ]
    assert answer.memory.promoted_rows == 0
    assert 96 - PAGE < answer.memory.active_rows <= 96
    assert answer.memory.peak_rows <= answer.memory.bound_rows
