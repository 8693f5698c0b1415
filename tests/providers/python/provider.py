#!/usr/bin/env python3
"""The smallest complete provider in another language: its "VMs" are files in a folder, and so are its disks.

    provider.py FOLDER        the node starts it so, with PEERPOD_PROVIDER_SOCKET in its environment

proto/protos/provider.proto says what is asked and answered; providers/README.md walks through this file.
"""

import hashlib
import json
import os
import sys
import threading
import time

import ttrpc

ERROR = {1: ("error", "Error")}
OWNER = {1: ("owner", "Owner")}
ID = OWNER | {2: ("id", "string")}
# Of provider.proto, what this provider reads and writes.
TABLES = {
    "Owner": {1: ("cluster_id", "string"), 2: ("node_name", "string"), 3: ("installation", "string")},
    "Error": {1: ("class", "string"), 2: ("text", "string"), 5: ("field", "string")},
    "Capabilities": {1: ("max_user_data", "uint"), 5: ("volumes", "bool"), 6: ("console", "bool")},
    "HandshakeRequest": {1: ("oldest_version", "uint"), 2: ("newest_version", "uint"), 3: ("owner", "Owner")},
    "HandshakeResponse": ERROR
    | {2: ("version", "uint"), 3: ("name", "string"), 4: ("capabilities", "Capabilities"), 5: ("program", "string")},
    "Empty": {},
    "Only error": ERROR,
    "Only owner": OWNER,
    "PreflightResponse": ERROR | {2: ("facts", ["string"])},
    "Disk": {1: ("volume", "string"), 2: ("read_only", "bool")},
    "DiskIdentity": {1: ("serial", "string")},
    "AttachedDisk": {1: ("volume", "string"), 2: ("identity", "DiskIdentity")},
    "CreateRequest": OWNER
    | {
        2: ("key", "string"),
        3: ("digest", "string"),
        4: ("name", "string"),
        5: ("user_data", "bytes"),
        8: ("size.gpus", "uint"),
        9: ("size.gpu_model", "string"),
        10: ("instance_type", "string"),
        11: ("image", "string"),
        12: ("disks", ["Disk"]),
        14: ("second_nic", "bool"),
        15: ("arch", "string"),
        16: ("confidential", "string"),
        17: ("market", "string"),
        18: ("zones", ["string"]),
        19: ("public_ip", "bool"),
    },
    "CreateResponse": ERROR | {2: ("id", "string"), 3: ("addresses", ["string"]), 5: ("disks", ["AttachedDisk"])},
    "AddressesRequest": ID | {3: ("wait_ms", "uint")},
    "AddressesResponse": ERROR | {2: ("addresses", ["string"])},
    "DeleteRequest": ID,
    "OwnedVm": {
        1: ("id", "string"),
        2: ("key", "string"),
        3: ("name", "string"),
        4: ("state", "string"),
        5: ("addresses", ["string"]),
        6: ("created_unix_ms", "uint"),
        7: ("node", "string"),
    },
    "ListOwnedResponse": ERROR | {2: ("vms", ["OwnedVm"])},
    "AttachRequest": ID | {3: ("disk", "Disk")},
    "AttachResponse": ERROR | {2: ("identity", "DiskIdentity")},
    "DetachRequest": ID | {3: ("volume", "string")},
    "ConsoleRequest": ID | {3: ("limit", "uint")},
    "ConsoleResponse": ERROR | {2: ("tail", "bytes")},
}

MAX_USER_DATA = 16 * 1024
# What a create may ask for and this provider cannot do. What it cannot do is refused, never dropped.
CANNOT = (
    "size.gpus size.gpu_model instance_type image second_nic arch confidential zones public_ip".split()
)


class Failure(Exception):
    """What becomes the `error` of an answer."""

    def __init__(self, kind, text, field=""):
        super().__init__(text)
        self.error = {"class": kind, "text": text, "field": field}


def owns(owner, mark):
    """Whether the VM with this mark is the owner's."""
    return all(mark[name] == owner[name] for name in ("cluster_id", "node_name", "installation"))


def answers(method):
    """A Failure is an answer, too."""

    def answer(self, request):
        try:
            return method(self, request)
        except Failure as failure:
            return {"error": failure.error}

    return answer


class Shelf:
    """Everything that counts is in files: any call may be the last one before this process is killed."""

    methods = {
        "Handshake": ("HandshakeRequest", "HandshakeResponse", "handshake"),
        "Health": ("Empty", "Empty", "health"),
        "Preflight": ("Only owner", "PreflightResponse", "preflight"),
        "Create": ("CreateRequest", "CreateResponse", "create"),
        "Addresses": ("AddressesRequest", "AddressesResponse", "addresses"),
        "Delete": ("DeleteRequest", "Only error", "delete"),
        "ListOwned": ("Only owner", "ListOwnedResponse", "list_owned"),
        "Attach": ("AttachRequest", "AttachResponse", "attach"),
        "Detach": ("DetachRequest", "Only error", "detach"),
        "Console": ("ConsoleRequest", "ConsoleResponse", "console"),
    }

    def __init__(self, folder):
        self.vms, self.volumes = os.path.join(folder, "vms"), os.path.join(folder, "volumes")
        for each in (self.vms, self.volumes):
            os.makedirs(each, mode=0o700, exist_ok=True)
        self.lock = threading.Lock()  # calls come side by side

    # Files. A record is written whole or not at all.

    def path(self, vm_id):
        name = vm_id.removeprefix("shelf-")
        known = vm_id.startswith("shelf-") and len(name) == 40 and all(c in "0123456789abcdef" for c in name)
        return os.path.join(self.vms, vm_id + ".json") if known else None

    def read(self, owner, vm_id):
        """The record of this owner's VM, or None: another owner's VM does not exist for it."""
        path = self.path(vm_id)
        try:
            with open(path or os.devnull, encoding="utf-8") as file:
                record = json.load(file) if path else None
        except FileNotFoundError:
            return None
        return record if record and owns(owner, record["owner"]) else None

    def write(self, record):
        path = self.path(record["id"])
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(path + ".new", path)

    def must_read(self, request, what):
        record = self.read(request["owner"], request["id"])
        if record is None:
            raise Failure("not_found", f"{what} of {request['id']}: there is no such VM")
        return record

    # The service.

    @answers
    def handshake(self, request):
        return {
            "version": 1,
            "name": "shelf",
            "program": "python " + sys.version.split()[0],
            "capabilities": {"max_user_data": MAX_USER_DATA, "volumes": True, "console": True},
        }

    def health(self, _request):
        return {}

    @answers
    def preflight(self, _request):
        if not os.access(self.vms, os.W_OK):
            raise Failure("auth", f"cannot write to {self.vms}; give this user the right to")
        return {"facts": [f"VMs are files in {self.vms}"]}

    @answers
    def create(self, request):
        what = f"create of {request['name']}"
        for field in CANNOT:
            if request[field]:
                raise Failure("unsupported", f"{what}: a shelf has no {field}", field)
        if request["market"] == "spot":
            raise Failure("unsupported", f"{what}: a shelf has no market", "market")
        if len(request["user_data"]) > MAX_USER_DATA:
            raise Failure("invalid", f"{what}: user-data of more than {MAX_USER_DATA} bytes")
        # The id follows from owner and key: that is all the idempotency a folder needs.
        owner, key = request["owner"], request["key"]
        mark = json.dumps([owner["cluster_id"], owner["node_name"], key])
        vm_id = "shelf-" + hashlib.sha256(mark.encode()).hexdigest()[:40]
        with self.lock:
            record = self.read(owner, vm_id)
            if record is None:
                record = {
                    "id": vm_id,
                    "owner": owner,
                    "key": key,
                    "digest": request["digest"],
                    "name": request["name"],
                    "user_data": request["user_data"].decode(),
                    "address": address(vm_id),
                    "created_unix_ms": int(time.time() * 1000),
                }
                for disk in request["disks"]:
                    self.free(disk["volume"], vm_id, what)  # before anything is made
                self.write(record)
            elif record["digest"] != request["digest"]:
                raise Failure("key_reused", f"{what}: its key came with another request before")
            disks = [{"volume": disk["volume"], "identity": self.plug(disk["volume"], vm_id, what)} for disk in request["disks"]]
        return {"id": vm_id, "addresses": [record["address"]], "disks": disks}

    @answers
    def addresses(self, request):
        # A cloud would not know them at first: then wait up to `wait_ms`, and answer with none.
        return {"addresses": [self.must_read(request, "addresses")["address"]]}

    @answers
    def delete(self, request):
        with self.lock:
            if self.read(request["owner"], request["id"]) is not None:
                for volume in os.listdir(self.volumes):
                    self.unplug(volume, request["id"])
                os.unlink(self.path(request["id"]))
        return {}  # gone already is a success

    @answers
    def list_owned(self, request):
        owned = []
        for name in os.listdir(self.vms):
            record = name.endswith(".json") and self.read(request["owner"], name.removesuffix(".json"))
            if record:
                owned.append(record | {"state": "running", "addresses": [record["address"]]})
        return {"vms": owned}

    @answers
    def attach(self, request):
        what = f"attach of {request['disk']['volume']}"
        with self.lock:
            self.must_read(request, what)
            return {"identity": self.plug(request["disk"]["volume"], request["id"], what)}

    @answers
    def detach(self, request):
        with self.lock:
            if self.read(request["owner"], request["id"]) is not None:
                self.unplug(request["volume"], request["id"])
        return {}

    @answers
    def console(self, request):
        record = self.must_read(request, "console")
        return {"tail": f"{record['name']} booted\n".encode()[-request["limit"] :] if request["limit"] else b""}

    # Disks: a file that says where it is attached.

    def free(self, volume, vm_id, what):
        try:
            with open(os.path.join(self.volumes, os.path.basename(volume)), encoding="utf-8") as file:
                at = file.read().strip()
        except OSError:
            raise Failure("not_found", f"{what}: there is no disk {volume}") from None
        if at and at != vm_id:
            raise Failure("invalid", f"{what}: disk {volume} is attached to {at}; detach it there")

    def plug(self, volume, vm_id, what):
        self.free(volume, vm_id, what)
        with open(os.path.join(self.volumes, os.path.basename(volume)), "w", encoding="utf-8") as file:
            file.write(vm_id)
        # What the hardware says: the same every time, whatever else is attached.
        return {"serial": hashlib.sha256(volume.encode()).hexdigest()[:20]}

    def unplug(self, volume, vm_id):
        path = os.path.join(self.volumes, os.path.basename(volume))
        if os.path.exists(path):
            with open(path, "r+", encoding="utf-8") as file:
                if file.read().strip() == vm_id:
                    file.truncate(0)


def address(vm_id):
    """An address of its own, for a machine that is none."""
    digits = hashlib.sha256(vm_id.encode()).hexdigest()
    return "fd50::" + ":".join(digits[i : i + 4] for i in range(0, 16, 4))


def serve(shelf, connection=ttrpc.Connection):
    server = ttrpc.Server(os.environ["PEERPOD_PROVIDER_SOCKET"], "peerpod.provider.v1.Provider", TABLES, shelf, connection)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("shelf serves", file=sys.stderr, flush=True)
    sys.stdin.buffer.read()  # ends when whoever started us is gone, and so do we


if __name__ == "__main__":
    serve(Shelf(sys.argv[1]))
