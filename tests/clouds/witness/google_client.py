"""Google's client as a witness: makes one call and prints its result as JSON.

usage: google_client.py ENDPOINT CLIENT.METHOD JSON-REQUEST

For example `InstancesClient.insert`. A list is the list of all its pages' items. The client's own models refuse fields
that they do not know.
"""

import json
import sys

from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1


def plain(value):
    if hasattr(type(value), "to_dict"):
        return type(value).to_dict(value, use_integers_for_enums=False)
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    return value


endpoint, operation, arguments = sys.argv[1:]
kind, method = operation.split(".")
client = getattr(compute_v1, kind)(
    credentials=AnonymousCredentials(), client_options={"api_endpoint": endpoint}, transport="rest"
)
words = "".join(part.capitalize() for part in method.split("_"))
resource = kind.removesuffix("Client")
names = [name for name in dir(compute_v1) if name.lower() in
         {f"{words}{resource}Request".lower(), f"{words}{resource[:-1]}Request".lower()}]
request = getattr(compute_v1, names[0]).from_json(arguments)
answer = getattr(client, method + "_unary" if hasattr(client, method + "_unary") else method)(request)
if hasattr(answer, "pages"):
    answer = [plain(one) for one in answer]
json.dump(plain(answer), sys.stdout)
