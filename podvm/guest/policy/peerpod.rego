# What a kata-agent's policy must know of a peer pod: the requests that peerpod-guest changes reach the agent changed, and
# the policy looks at them afterwards. Put these rules into a policy of package agent_policy and have its rules for
# CreateContainerRequest and CreateSandboxRequest ask for peerpod_container(input) and peerpod_sandbox(input) besides what
# they ask for of the pod itself.
#
# They say what the change is and no more: whatever else a request holds is the policy's to judge. A policy that compares a
# request with a specification must leave out of the comparison: Linux.Namespaces of type "network", the annotation
# "cdi.k8s.io/peer-pods", and the sandbox's dns.
package agent_policy

import rego.v1

# The pod's network namespace in the VM: every container joins this one, and no other.
peerpod_netns := "/run/netns/podns"

# Folders of the VM below which peerpod-guest makes the missing source of a bind mount, and mounts volumes.
peerpod_sources := ["/run/kata-containers/shared/containers/", "/run/peerpod/volumes/"]

peerpod_container(request) if {
	networks := [namespace | some namespace in request.OCI.Linux.Namespaces; namespace.Type == "network"]
	count(networks) == 1
	networks[0].Path == peerpod_netns
	every mount in request.OCI.Mounts { peerpod_mount(mount) }
	every key, value in request.OCI.Annotations { peerpod_annotation(key, value) }
}

# A bind mount comes from where files are copied to, from a volume, or from what the agent made itself.
peerpod_mount(mount) if mount.type_ != "bind"

peerpod_mount(mount) if {
	some folder in array.concat(peerpod_sources, ["/run/kata-containers/sandbox/"])
	startswith(mount.source, folder)
	not contains(mount.source, "/../")
	not endswith(mount.source, "/..")
}

# The mark that gives a container the VM's GPUs, which only this one may be.
peerpod_annotation(key, _) if key != "cdi.k8s.io/peer-pods"

peerpod_annotation("cdi.k8s.io/peer-pods", value) if {
	every device in split(value, ",") { startswith(device, "nvidia.com/gpu=") }
}

# The VM keeps its own resolv.conf; containers get theirs as a file.
peerpod_sandbox(request) if count(object.get(request, "dns", [])) == 0
