"""Google's discovery document as a witness of calls and answers.

Standard input has one call per line: {"id", "method", "path", "query", "body", "answer"}. Standard output has one list of
mistakes per line. The document is part of google-api-python-client.
"""

import json
import pathlib
import re
import sys

import googleapiclient

folder = pathlib.Path(googleapiclient.__file__).parent / "discovery_cache" / "documents"
document = json.loads((folder / "compute.v1.json").read_text())
schemas = document["schemas"]
shared = document["parameters"]

# int64 is a text in JSON.
KINDS = {"string": str, "boolean": bool, "integer": int, "number": (int, float), "object": dict, "array": list}
OUTPUT = re.compile(r"\[Output [Oo]nly\]")


def walk(place, value, schema, found, is_answer):
    """Compares a value with its schema."""
    schema = schemas[schema["$ref"]] if "$ref" in schema else schema
    kind = schema.get("type", "any")
    if kind == "any":
        return
    if not isinstance(value, KINDS[kind]) or isinstance(value, bool) and kind != "boolean":
        found.append(f"{place}: {type(value).__name__} where the document has {kind}")
        return
    if kind == "array":
        for number, one in enumerate(value):
            walk(f"{place}/{number}", one, schema["items"], found, is_answer)
    elif kind == "object":
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, one in value.items():
            inner = properties.get(name, others)
            if inner is None:
                found.append(f"{place}/{name}: the document does not know it")
                continue
            if not is_answer and (inner.get("readOnly") or OUTPUT.search(inner.get("description", ""))):
                found.append(f"{place}/{name}: output only")
            walk(f"{place}/{name}", one, inner, found, is_answer)
    elif kind == "string":
        text(place, value, schema, found)


def text(place, value, schema, found):
    """Compares a text with its schema."""
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{place}: {value!r} is none of {schema['enum']}")
    if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        found.append(f"{place}: {value!r} does not match {schema['pattern']}")
    if schema.get("format") in ("int64", "uint64") and not re.fullmatch(r"-?\d+", value):
        found.append(f"{place}: {value!r} is no number")


def method_of(id):
    group, name = id.split(".")[1:]
    return document["resources"].get(group, {}).get("methods", {}).get(name)


def parameters(call, method, found):
    """Compares path and query with the method's parameters."""
    known = {**shared, **method["parameters"]}
    names = re.findall(r"{(\w+)}", method["flatPath"])
    form = "/compute/v1/" + re.sub(r"{\w+}", "([^/]+)", method["flatPath"])
    matched = re.fullmatch(form, call["path"])
    if not matched:
        found.append(f"{call['path']}: the document has {method['flatPath']}")
        return
    given = dict(zip(names, matched.groups())) | call["query"]
    for name, value in given.items():
        parameter = known.get(name)
        if parameter is None:
            found.append(f"{name}: no parameter of {method['id']}")
            continue
        if parameter["type"] == "integer" and not re.fullmatch(r"-?\d+", value):
            found.append(f"{name}: {value!r} is no number")
        text(name, value, parameter, found)
    for name, parameter in method["parameters"].items():
        if parameter.get("required") and name not in given:
            found.append(f"{name}: required")


def mistakes(call):
    method = method_of(call["id"])
    if method is None:
        return [f"{call['id']}: the document does not know it"]
    found = []
    if method["httpMethod"] != call["method"]:
        found.append(f"{call['method']}: the document has {method['httpMethod']}")
    parameters(call, method, found)
    body, answer = call.get("body"), call.get("answer")
    if ("request" in method) != (body is not None):
        found.append("body: the document has " + ("one" if "request" in method else "none"))
    elif body is not None:
        walk("body", body, method["request"], found, False)
    if answer is not None:
        walk("answer", answer, method["response"], found, True)
    return found


for line in sys.stdin:
    print(json.dumps(mistakes(json.loads(line))), flush=True)
