"""VMware's client as a witness: finds a virtual machine by its path, and prints it as JSON.

usage: vmware_client.py URL USER PASSWORD PATH
"""

import json
import sys
from urllib.parse import urlsplit

from pyVim.connect import SmartConnect
from pyVmomi import vim, vmodl

url, user, password, path = sys.argv[1:]
at = urlsplit(url)
content = SmartConnect(protocol=at.scheme, host=at.hostname, port=at.port, user=user, pwd=password).RetrieveContent()
vm = content.searchIndex.FindByInventoryPath(path)


def device(one):
    backing = getattr(one, "backing", None)
    port = getattr(backing, "port", None)
    return {
        "kind": type(one).__name__.rsplit(".", 1)[-1],
        "key": one.key,
        "file": getattr(backing, "fileName", None),
        "network": getattr(backing, "deviceName", None) or getattr(port, "portgroupKey", None),
        "first-class": one.vDiskId.id if getattr(one, "vDiskId", None) else None,
        "mode": getattr(backing, "diskMode", None),
    }


# Leaves alone: the simulator has an empty word in `runtime`, which the client refuses.
PATHS = {
    "power": "runtime.powerState",
    "host": "runtime.host",
    "pool": "resourcePool",
    "folder": "parent",
    "instance": "config.instanceUuid",
    "annotation": "config.annotation",
    "vcpus": "config.hardware.numCPU",
    "memory": "config.hardware.memoryMB",
    "variables": "config.extraConfig",
    "devices": "config.hardware.device",
}
query = vmodl.query.PropertyCollector
wanted = query.FilterSpec(
    objectSet=[query.ObjectSpec(obj=vm)],
    propSet=[query.PropertySpec(type=vim.VirtualMachine, pathSet=list(PATHS.values()))],
)
found = content.propertyCollector.RetrievePropertiesEx([wanted], query.RetrieveOptions()).objects[0]
values = {one.name: one.val for one in found.propSet}
seen = {name: values.get(path) for name, path in PATHS.items()}
for name in ["host", "pool", "folder"]:
    seen[name] = seen[name] and seen[name].name
seen["variables"] = {one.key: one.value for one in seen["variables"]}
seen["devices"] = [device(one) for one in seen["devices"]]
json.dump(seen, sys.stdout)
