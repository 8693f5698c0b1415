"""ttrpc and protobuf, as much of them as a provider needs. Standard library only.

A frame is 10 bytes of header (length u32 BE, stream id u32 BE, type u8, flags u8) and a payload. Requests are type 1, their
payload is {1: service, 2: method, 3: payload, 4: timeout_nano}; responses are type 2, {1: {1: code, 2: message}, 2: payload}.

Messages are dicts. A table says what is in them: {number: (name, kind)}, where kind is "string", "bytes", "uint", "bool",
the name of another table, or [kind] for a repeated field, or "map" for map<string, string>. What the table does not know
is skipped; what is not there reads as its zero value.
"""

import os
import socket
import socketserver
import struct
import sys
import threading

MOST = 4 << 20


def put_varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def get_varint(data, at):
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & (1 << 64) - 1, at
        shift += 7
        if shift > 63:
            raise ValueError("a varint that does not end")


def encode(tables, name, message):
    out = bytearray()
    for number, (field, kind) in tables[name].items():
        many = isinstance(kind, list)
        values = message.get(field) or []
        if kind == "map":
            values = [{"key": k, "value": v} for k, v in dict(values).items()]
        elif not many:
            values = [message[field]] if field in message and message[field] is not None else []
        kind = kind[0] if many else kind
        for value in values:
            if kind in ("uint", "bool"):
                out += put_varint(number << 3) + put_varint(int(value))
                continue
            if kind == "string":
                value = value.encode()
            elif kind == "map":
                value = encode({"map": {1: ("key", "string"), 2: ("value", "string")}}, "map", value)
            elif kind != "bytes":
                value = encode(tables, kind, value)
            out += put_varint(number << 3 | 2) + put_varint(len(value)) + value
    return bytes(out)


def decode(tables, name, data):
    message = {}
    for field, kind in tables[name].values():
        zero = {"string": "", "bytes": b"", "uint": 0, "bool": False, "map": {}}
        message[field] = [] if isinstance(kind, list) else dict(zero["map"]) if kind == "map" else zero.get(kind)
    at = 0
    while at < len(data):
        tag, at = get_varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = get_varint(data, at)
        elif wire == 2:
            size, at = get_varint(data, at)
            value, at = data[at : at + size], at + size
            if len(value) < size:
                raise ValueError("a field that does not end")
        elif wire in (1, 5):
            value, at = None, at + (8 if wire == 1 else 4)
        else:
            raise ValueError("a wire type of old")
        if tag >> 3 not in tables[name] or value is None:
            continue
        field, kind = tables[name][tag >> 3]
        many = isinstance(kind, list)
        kind = kind[0] if many else kind
        if kind == "string":
            value = value.decode()
        elif kind == "bool":
            value = bool(value)
        elif kind == "map":
            entry = decode({"map": {1: ("key", "string"), 2: ("value", "string")}}, "map", value)
            message[field][entry["key"]] = entry["value"]
            continue
        elif kind not in ("bytes", "uint"):
            value = decode(tables, kind, value)
        if many:
            message[field].append(value)
        else:
            message[field] = value
    return message


ENVELOPE = {
    "Request": {1: ("service", "string"), 2: ("method", "string"), 3: ("payload", "bytes"), 4: ("timeout_nano", "uint")},
    "Response": {1: ("status", "Status"), 2: ("payload", "bytes")},
    "Status": {1: ("code", "uint"), 2: ("message", "string")},
}


def read_exactly(connection, size):
    data = bytearray()
    while len(data) < size:
        more = connection.recv(min(size - len(data), 1 << 16))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


class Connection(socketserver.BaseRequestHandler):
    """One node. Every call has a thread: a slow one must not keep Health waiting."""

    def handle(self):
        writing = threading.Lock()
        try:
            while True:
                size, stream, kind, _ = struct.unpack(">IIBB", read_exactly(self.request, 10))
                if size > MOST:
                    raise ValueError(f"a frame of {size} bytes")
                data = read_exactly(self.request, size)
                if kind == 1:
                    threading.Thread(target=self.call, args=(stream, data, writing), daemon=True).start()
        except (EOFError, ConnectionError):
            pass
        except ValueError as error:
            print(f"connection given up: {error}", file=sys.stderr)

    def call(self, stream, data, writing):
        try:
            request = decode(ENVELOPE, "Request", data)
            answer = {"payload": self.server.dispatch(request)}
        except NotImplementedError as error:
            answer = {"status": {"code": 12, "message": str(error)}}
        except Exception as error:  # whatever it is: the caller may ask again, and the log says what it was
            print(f"call failed: {type(error).__name__}: {error}", file=sys.stderr)
            answer = {"status": {"code": 13, "message": type(error).__name__}}
        self.answer(stream, encode(ENVELOPE, "Response", answer), writing)

    def answer(self, stream, data, writing):
        with writing:
            try:
                self.request.sendall(struct.pack(">IIBB", len(data), stream, 2, 0) + data)
            except OSError:
                pass  # the node is gone; it asks again


class Server(socketserver.ThreadingUnixStreamServer):
    """Serves `service` on a unix socket: its methods take and give messages of `tables`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, path, service_name, tables, service, connection=Connection):
        self.service_name, self.tables, self.service = service_name, tables, service
        if os.path.exists(path):
            os.unlink(path)
        os.umask(0o077)  # the socket is for our own user alone
        super().__init__(path, connection)

    def dispatch(self, request):
        method = request["method"]
        names = self.service.methods.get(method)
        if request["service"] != self.service_name or names is None:
            raise NotImplementedError(f"{request['service']}.{method}")
        asked = decode(self.tables, names[0], request["payload"])
        return encode(self.tables, names[1], getattr(self.service, names[2])(asked))

    def get_request(self):
        connection, address = super().get_request()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection, address
