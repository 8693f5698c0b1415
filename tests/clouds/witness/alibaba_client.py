"""Alibaba Cloud's client as a witness: makes one call and prints the body of its answer as JSON.

usage: alibaba_client.py ENDPOINT METHOD JSON-REQUEST

For example `describe_instances`. The request is in the form of the API's names.
"""

import json
import sys

from alibabacloud_ecs20140526 import models
from alibabacloud_ecs20140526.client import Client
from alibabacloud_tea_openapi.utils_models import Config

endpoint, method, arguments = sys.argv[1:]
client = Client(
    Config(
        access_key_id="witness",
        access_key_secret="witness",
        region_id="cn-beijing",
        endpoint=endpoint.removeprefix("http://"),
        protocol="http",
    )
)
words = "".join(part.capitalize() for part in method.split("_"))
names = {name.lower(): name for name in dir(models)}
request = getattr(models, names[f"{words}Request".lower()])().from_map(json.loads(arguments))
answer = getattr(client, method)(request)
json.dump(answer.body.to_map(), sys.stdout)
