"""Alibaba Cloud's models and signer as a witness. Reads calls, one JSON object a line: `action`, `method`, `path`,
`query`, `parameters`, `headers` (the signed ones), `authorization`, `secret`, and `answer` if it was no refusal. Prints a
list for each: the parameters and members that the models do not know, and a signature that differs from the signer's.
"""

import json
import sys
from types import SimpleNamespace

from alibabacloud_ecs20140526 import models
from alibabacloud_tea_openapi.utils import Utils

names = {name.lower(): name for name in dir(models)}


def nested(flat):
    """Returns the objects and lists of flat parameters: `Tag.1.Key`."""
    tree = {}
    for name, value in flat.items():
        place, parts = tree, name.split(".")
        for part in parts[:-1]:
            place = place.setdefault(part, {})
        place[parts[-1]] = value

    def lists(value):
        if not isinstance(value, dict):
            return value
        if value and all(key.isdigit() for key in value):
            return [lists(value[key]) for key in sorted(value, key=int)]
        return {key: lists(one) for key, one in value.items()}

    return lists(tree)


def model(name):
    return getattr(models, names[name.lower()])()


def lost(known, given, path=""):
    """Yields the members of an answer that the model has lost."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(known, dict) or key not in known:
                yield f"{path}/{key}"
            else:
                yield from lost(known[key], value, f"{path}/{key}")
    elif isinstance(given, list):
        for number, value in enumerate(given):
            yield from lost(known[number] if isinstance(known, list) and number < len(known) else None, value, path)


def check(call):
    found = []
    given = call["parameters"]
    known = Utils.query(model(call["action"] + "Request").from_map(nested(given)).to_map())
    found += [f"parameter {name}" for name in given if known.get(name) != given[name]]
    if "answer" in call:
        body = model(call["action"] + "ResponseBody").from_map(call["answer"]).to_map()
        found += [f"member {name}" for name in lost(body, call["answer"])]
    if call["authorization"]:
        request = SimpleNamespace(
            method=call["method"], pathname=call["path"], query=call["query"], headers=call["headers"]
        )
        algorithm, rest = call["authorization"].split(" ", 1)
        key = rest.split(",")[0].removeprefix("Credential=")
        payload = call["headers"]["x-acs-content-sha256"]
        signed = Utils.get_authorization(request, algorithm, payload, key, call["secret"])
        if signed != call["authorization"]:
            found.append("signature")
    return found


for line in sys.stdin:
    print(json.dumps(check(json.loads(line))))
