"""IBM's models as a witness: sends JSON through them and back, and names what they do not know.

Standard input has one {"type": ..., "body": ...} per line; standard output has one list of the differences per line.
"""

import json
import sys
from datetime import datetime

from ibm_vpc import vpc_v1


def same(ours, theirs):
    """A time may be written in another way."""
    if ours == theirs:
        return True
    try:
        return datetime.fromisoformat(ours) == datetime.fromisoformat(theirs)
    except (TypeError, ValueError):
        return False


def compare(place, ours, theirs, found):
    if isinstance(ours, dict):
        if not isinstance(theirs, dict):
            found.append(f"{place}: is no object in the model")
            return
        for name, value in ours.items():
            if name in theirs:
                compare(f"{place}/{name}", value, theirs[name], found)
            # The models leave out a null.
            elif value is not None:
                found.append(f"{place}/{name}: the model does not know it")
    elif isinstance(ours, list):
        if not isinstance(theirs, list) or len(theirs) != len(ours):
            found.append(f"{place}: another list in the model")
            return
        for number, value in enumerate(ours):
            compare(f"{place}/{number}", value, theirs[number], found)
    elif not same(ours, theirs):
        found.append(f"{place}: the model changes it")


def words(place, model, found):
    """Adds the words in a model that are none of its enumeration."""
    for name, value in vars(model).items():
        enumeration = getattr(type(model), "".join(part.title() for part in name.split("_")) + "Enum", None)
        for one in value if isinstance(value, list) else [value]:
            if hasattr(one, "to_dict"):
                words(f"{place}/{name}", one, found)
            elif enumeration and isinstance(one, str) and one not in {word.value for word in enumeration}:
                found.append(f"{place}/{name}: {one!r} is none of its words")


def differences(kind, body):
    model = getattr(vpc_v1, kind, None)
    if model is None:
        return [f"{kind}: there is no such model"]
    try:
        made = model.from_dict(body)
    except (ValueError, TypeError) as error:
        return [f"{kind}: {error}"]
    found = []
    compare(kind, body, json.loads(json.dumps(made.to_dict())), found)
    words(kind, made, found)
    return sorted(found)


for line in sys.stdin:
    one = json.loads(line)
    print(json.dumps(differences(one["type"], one["body"])), flush=True)
