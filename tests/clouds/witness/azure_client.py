"""Microsoft's client as a witness: makes one call and prints its result as JSON.

usage: azure_client.py ENDPOINT SUBSCRIPTION OPERATION JSON-ARGUMENTS

OPERATION is of azure-mgmt-compute (virtual_machines.get) or, after `network.`, of azure-mgmt-network. An operation that
begins with `begin_` is waited for by the client's own poller.
"""

import json
import sys

from azure.core.pipeline.policies import SansIOHTTPPolicy
from azure.mgmt.compute import ComputeManagementClient
from azure.mgmt.network import NetworkManagementClient


class Credential:
    """No token: the bearer policy insists on TLS, and the witness's port asks for none."""

    def get_token(self, *scopes, **_):
        raise RuntimeError("the witness needs no token")


def plain(value):
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if hasattr(value, "__iter__"):
        return [plain(one) for one in value]
    return str(value)


endpoint, subscription, operation, arguments = sys.argv[1:]
kind = ComputeManagementClient
if operation.startswith("network."):
    kind, operation = NetworkManagementClient, operation.removeprefix("network.")
client = kind(
    Credential(), subscription, base_url=endpoint, authentication_policy=SansIOHTTPPolicy(), polling_interval=0,
    retry_total=0,
)
group, name = operation.split(".")
arguments = json.loads(arguments)
if arguments.pop("if_none_match", None):
    from azure.core import MatchConditions

    arguments["etag"], arguments["match_condition"] = "*", MatchConditions.IfMissing
answer = getattr(getattr(client, group), name)(**arguments)
json.dump(plain(answer.result() if name.startswith("begin_") else answer), sys.stdout)
