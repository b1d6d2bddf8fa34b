"""Messages arrive whole, once and in order, whatever the pieces that the socket gives them in."""

import os
import resource
import socket
import threading
from collections.abc import Iterator

import pytest
from extents import extent_of_all
from headers import header_of

from batchinf import records
from batchinf.engines.protocol import EngineInfo, EngineStats
from batchinf.fleet.local.channel import Channel
from batchinf.replica import messages

PART = records.Part(shard=3, num_rows=10, num_errors=1, num_bytes=2048, digest="00ff", num_kept=2)
MESSAGES = (
    messages.Launch(1, "000001.0001", "out", "ab", "{}", "model", "tokenizer", None, (0, 2)),
    messages.Work(
        input="{}",
        metadata={"batchinf.job_id": "ab"},
        source_folder="source",
        taken=("first",),
        extents=(extent_of_all(0, 9, 3, 0, 0),),
        begun_at=None,
        columns=header_of().columns,
    ),
    messages.Assign(
        (records.Lease(0, 0, 10, attempts=2), records.Lease(1, 10, 2**40, is_whole=False)), ((3, "x"),), 0.1
    ),
    messages.Revoke(((1, 4, 8), (2, 9, 12))),
    messages.Trial((records.Lease(1, 0, 9),), (1, 2, 3)),
    messages.MayStore(),
    messages.Stop(2.5),
    messages.StartPhase("loading …"),
    messages.StartPhase("waiting for a node", shortage="each asks for 1 GPU"),
    messages.Ready(EngineInfo(512, 8, 1536, "none", {"vllm": "0.32"}, {"max_num_seqs": 8}), 1.5),
    messages.Progress(5, {"empty_prompt": 1}, 70, 90, 12, 3, 0.25, EngineStats(3, 1, 0.5, 0, 7, 2)),
    messages.LeaseBegun((4, 40, 60), 17, 16),
    messages.LeaseDone(records.Lease(4, 40, 60), 17, {"empty_prompt": 1}),
    messages.LeaseDone(records.Lease(4, 40, 60), 17, {"empty_prompt": 1}, PART),
    messages.Revoked(()),
    messages.Tried((1, 2)),
    messages.Failed("OSError", "no space left", 2),
    messages.Stopped(),
)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    channels = Channel(ours), Channel(theirs)
    yield channels
    for channel in channels:
        channel.close()


def receive(channel: Channel, number: int) -> list:
    received: list = []
    while len(received) < number:
        messages = channel.receive(5.0)
        assert messages or not channel.is_closed
        received += messages
    return received


def test_every_message_arrives_as_it_was_sent(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    for message in MESSAGES:
        one.send(message)
    assert tuple(receive(other, len(MESSAGES))) == MESSAGES


def test_every_command_and_event_can_be_sent() -> None:
    kinds = {type(message) for message in MESSAGES}
    assert kinds == {messages.Launch, *messages.Command.__args__, *messages.Event.__args__}


def test_a_message_in_pieces_arrives_once_it_is_whole(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    one.send(MESSAGES[1])
    one.send(MESSAGES[2])
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    data = os.read(other.fileno(), 1 << 20)
    received = []
    for index in range(len(data)):
        ours.send(data[index : index + 1])
        received += channel.receive(1.0)
    assert received == [MESSAGES[1], MESSAGES[2]]
    channel.close()
    ours.close()


def test_the_end_of_the_peer_comes_after_its_last_words(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    one.send(MESSAGES[-2])
    one.close()
    assert other.receive(1.0) == [MESSAGES[-2]]
    assert not other.is_closed
    assert other.receive(1.0) == []
    assert other.is_closed
    other.send(MESSAGES[3])  # to nobody: no error


def test_nothing_to_receive_is_no_end(pair: tuple[Channel, Channel]) -> None:
    assert pair[0].receive(0) == []
    assert not pair[0].is_closed


def test_a_peer_that_does_not_read_holds_nobody_up() -> None:
    ours, theirs = socket.socketpair()
    one, other = Channel(ours, sends_later=True), Channel(theirs)
    long = messages.Failed("OSError", "no space left " * 100_000, 2)
    for _ in range(5):
        one.send(long)
        one.send(MESSAGES[2])
    assert receive(other, 10) == [long, MESSAGES[2]] * 5
    one.send(MESSAGES[3])  # the next one is sent at once again
    assert receive(other, 1) == [MESSAGES[3]]
    one.send(long)
    threads = [thread for thread in threading.enumerate() if thread.name == "send"]
    assert threads
    one.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    other.close()


def test_threads_do_not_cut_into_each_other(pair: tuple[Channel, Channel]) -> None:
    one, other = pair

    def talk(number: int) -> None:
        for index in range(100):
            one.send(messages.LeaseBegun((number, 0, 10), index, 0))

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    received = receive(other, 400)
    for thread in threads:
        thread.join()
    for number in range(4):
        assert [m.num_recovered for m in received if m.lease[0] == number] == list(range(100))


def test_a_process_with_many_open_files(pair: tuple[Channel, Channel]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    ours, theirs = socket.socketpair()
    os.dup2(theirs.fileno(), 1100)
    theirs.close()
    channel = Channel(socket.socket(fileno=1100))
    Channel(ours).send(MESSAGES[2])
    assert channel.receive(1.0) == [MESSAGES[2]]
    channel.close()
    ours.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
