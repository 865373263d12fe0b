"""What ingest told a worker, read from the bytes of a gRPC connection on their way: a witness outside the system.

HTTP/2 data frames carry gRPC messages in the open (no TLS on loopback, headers are not needed), and a PublishResponse
is told from the other answers by its id, a UUID. Source: RFC 9113, sections 4.1 and 6.1; gRPC over HTTP/2, "Responses".
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from sao.v1 import ingest_pb2 as pb

_FRAME_HEADER = 9
_DATA, _RST_STREAM = 0x0, 0x3
_END_STREAM, _PADDED = 0x1, 0x8
_MESSAGE_HEADER = 5
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Answer:
    """One PublishResponse."""

    trajectory_id: str
    status: str
    """accepted | duplicate | superseded"""


class AnswerReader:
    """Reads one connection, server to client."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._messages: defaultdict[int, bytearray] = defaultdict(bytearray)

    def feed(self, data: bytes) -> list[Answer]:
        """The answers that end in these bytes. Raises ValueError for a compressed message: it could not be told."""
        self._bytes += data
        answers: list[Answer] = []
        while len(self._bytes) >= _FRAME_HEADER:
            length = int.from_bytes(self._bytes[:3])
            kind, flags = self._bytes[3], self._bytes[4]
            stream = int.from_bytes(self._bytes[5:9]) & 0x7FFFFFFF
            end = _FRAME_HEADER + length
            if len(self._bytes) < end:
                break
            body = bytes(self._bytes[_FRAME_HEADER:end])
            del self._bytes[:end]
            if kind == _DATA:
                self._messages[stream] += body[1 : length - body[0]] if flags & _PADDED else body
                answers += self._whole_messages(stream)
            if kind == _RST_STREAM or flags & _END_STREAM:
                self._messages.pop(stream, None)
        return answers

    def _whole_messages(self, stream: int) -> list[Answer]:
        buffer, answers = self._messages[stream], []
        while len(buffer) >= _MESSAGE_HEADER:
            end = _MESSAGE_HEADER + int.from_bytes(buffer[1:5])
            if len(buffer) < end:
                break
            if buffer[0]:
                msg = "ingest sent a compressed message: the ledger of acknowledgements would have a hole"
                raise ValueError(msg)
            if (answer := _answer(bytes(buffer[_MESSAGE_HEADER:end]))) is not None:
                answers.append(answer)
            del buffer[:end]
        return answers


def _answer(message: bytes) -> Answer | None:
    try:
        response = pb.PublishResponse.FromString(message)
    except DecodeError:
        return None
    if not _UUID.fullmatch(response.id) or not response.status:
        return None
    return Answer(response.id, pb.PublishStatus.Name(response.status).removeprefix("PUBLISH_STATUS_").lower())
