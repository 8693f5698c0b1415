"""IBM's client as a witness: makes one call and prints its result as JSON.

usage: ibm_client.py ENDPOINT OPERATION JSON-ARGUMENTS
"""

import json
import sys

from ibm_cloud_sdk_core.authenticators import NoAuthAuthenticator
from ibm_vpc import VpcV1

endpoint, operation, arguments = sys.argv[1:]
client = VpcV1(authenticator=NoAuthAuthenticator())
client.set_service_url(f"{endpoint}/v1")
json.dump(getattr(client, operation)(**json.loads(arguments)).get_result(), sys.stdout)
