"""boto3 as a witness: calls one operation and prints what it says, as JSON.

usage: witness.py ENDPOINT REGION OPERATION JSON-ARGUMENTS
"""

import json
import sys

import boto3

endpoint, region, operation, arguments = sys.argv[1:]
client = boto3.client(
    "ec2", endpoint_url=endpoint, region_name=region, aws_access_key_id="witness", aws_secret_access_key="witness"
)
arguments = json.loads(arguments)
if client.can_paginate(operation):
    answer = client.get_paginator(operation).paginate(**arguments).build_full_result()
else:
    answer = getattr(client, operation)(**arguments)
json.dump(answer, sys.stdout, default=str)
