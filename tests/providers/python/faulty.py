#!/usr/bin/env python3
"""A shelf that goes wrong in one way, for the tests: faulty.py FOLDER FAULT

Faults that strike once leave a file in FOLDER, so that the next process is a good one."""

import os
import struct
import sys
import time

import provider
import ttrpc

folder, fault = sys.argv[1], sys.argv[2]


def first_time():
    """Whether this is the first time that anybody asks."""
    try:
        os.close(os.open(os.path.join(folder, "struck"), os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False


class Faulty(provider.Shelf):
    def handshake(self, request):
        if fault == "silent":
            time.sleep(3600)
        answer = super().handshake(request)
        if fault == "another-version":
            answer["version"] = 9
        if fault == "no-name":
            answer["name"] = "Not A Name"
        if fault == "turns-away":
            return {"error": {"class": "auth", "text": f"cluster {request['owner']['cluster_id']} is not served here"}}
        if fault == "tiny-user-data":
            answer["capabilities"] = {"max_user_data": 1}
        if fault == "becomes-another" and not first_time():
            answer["capabilities"] = answer["capabilities"] | {"console": False}
        return answer

    def health(self, request):
        if fault == "hangs" and first_time():
            time.sleep(3600)
        return super().health(request)

    def create(self, request):
        if fault == "forgets-keys":
            request["key"] = os.urandom(8).hex()
        answer = super().create(request)
        if fault in ("dies-after-create", "becomes-another") and (fault != "dies-after-create" or first_time()):
            print("the last word before death", file=sys.stderr, flush=True)
            os._exit(3)
        if fault == "closes-after-create" and first_time():
            raise Gone
        if fault == "wrong-id":
            answer["id"] = "../../etc/passwd \n"
        if fault == "wrong-address":
            answer["addresses"] = ["224.0.0.1"]
        if fault == "strange-class":
            return {"error": {"class": "moonstruck", "text": "try it at new moon"}}
        if fault == "shows-user-data":
            return {"error": {"class": "invalid", "text": "I do not like " + request["user_data"].decode()}}
        if fault == "slow":
            time.sleep(3600)
        return answer

    def delete(self, request):
        if fault == "keeps-vms":
            return {"error": {"class": "auth", "text": "this account deletes nothing"}}
        return super().delete(request)

    def addresses(self, request):
        answer = super().addresses(request)
        return {} if fault == "no-addresses" else answer

    def list_owned(self, request):
        if fault == "endless-list":
            return {"vms": [], "next_page": "again"}
        answer = super().list_owned(request)
        if fault == "lists-twice":
            answer["vms"] = answer["vms"] * 2
        if fault == "huge-list":
            answer["vms"] = [{"id": "x" * 1000, "state": "running"}] * 5000
        return answer


class Gone(Exception):
    """The connection ends instead of an answer."""


class Connection(ttrpc.Connection):
    def call(self, stream, data, writing):
        if fault == "closes-after-create" and b"Create" in data[:64] and not os.path.exists(os.path.join(folder, "struck")):
            request = ttrpc.decode(ttrpc.ENVELOPE, "Request", data)
            try:
                self.server.dispatch(request)
            except Gone:
                self.request.shutdown(2)
                return
        super().call(stream, data, writing)

    def answer(self, stream, data, writing):
        if fault == "garbage":
            data = os.urandom(len(data) or 1)
        if fault == "wrong-stream":
            stream += 1000
        if fault == "endless-frame":
            with writing:
                self.request.sendall(struct.pack(">IIBB", 0xFFFFFFFF, stream, 2, 0) + b"x" * 1000)
            return
        if fault == "no-frames":
            with writing:
                self.request.sendall(os.urandom(4096))
            return
        super().answer(stream, data, writing)


provider.TABLES["ListOwnedResponse"][3] = ("next_page", "string")
if fault == "exits":
    print("there is no region set", file=sys.stderr)
    sys.exit(7)
if fault == "chatters":
    for number in range(5000):
        print(f"{number} " + "x" * 5000)
    sys.stdout.flush()
provider.serve(Faulty(folder), Connection)
