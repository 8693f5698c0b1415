# What a kata-agent's policy must know of a peer pod: the requests that peerpod-guest changes reach the agent changed, and
# the policy looks at them afterwards. Put these rules into a policy of package agent_policy and have its rules for
# CreateContainerRequest and CreateSandboxRequest ask for peerpod_container(input) and peerpod_sandbox(input) besides what
# they ask for of the pod itself.
#
# They say which network, mounts, storages and devices a pod's container has in such a VM, and no more: whatever else a
# request holds is the policy's to judge. A policy that compares a request with a specification must leave out of the
# comparison: Linux.Namespaces of type "network", the annotation "cdi.k8s.io/peer-pods", the storages and devices of
# volumes, the sources of the mounts that are of them, and the sandbox's dns. Which of the VM's disks a volume is they
# cannot tell.
package agent_policy

import rego.v1

# The pod's network namespace in the VM: every container joins this one, and no other.
peerpod_netns := "/run/netns/podns"

# Where volumes are mounted, each in a folder of its identifier.
peerpod_volumes := "/run/peerpod/volumes/"

# Where the guest itself mounts shares that ask for a password, each in a folder of the same identifier.
peerpod_shares := "/run/peerpod/shares/"

# The shim's own storages, and what each is mounted as: memory, images, folders.
peerpod_kinds := {"ephemeral": {"hugetlbfs", "tmpfs"}, "image_guest_pull": {"overlay"}, "local": {"local"}}

# Folders of the agent's: what was copied into the VM, and what it made itself.
peerpod_sources := ["/run/kata-containers/shared/containers/", "/run/kata-containers/sandbox/"]

peerpod_container(request) if {
	networks := [namespace | some namespace in request.OCI.Linux.Namespaces; namespace.Type == "network"]
	count(networks) == 1
	networks[0].Path == peerpod_netns
	every mount in request.OCI.Mounts { peerpod_mount(mount, request.storages) }
	every storage in request.storages { peerpod_storage(storage) }
	every device in request.devices { peerpod_device(device) }
	every key, value in request.OCI.Annotations { peerpod_annotation(key, value) }
}

# What is bound says its type or its options.
peerpod_bind(mount) if mount.type_ == "bind"

peerpod_bind(mount) if {
	some option in mount.options
	option in {"bind", "rbind"}
}

# The kernel's own file systems, of which none has a disk.
peerpod_mount(mount, _) if {
	not peerpod_bind(mount)
	mount.type_ in {"cgroup", "cgroup2", "devpts", "mqueue", "proc", "sysfs", "tmpfs"}
}

# A bind mount comes from where files are copied to or from what the agent made itself,
peerpod_mount(mount, _) if {
	peerpod_bind(mount)
	some folder in peerpod_sources
	startswith(mount.source, folder)
	peerpod_plain(mount.source)
}

# or from a volume, if the same request has that mounted.
peerpod_mount(mount, storages) if {
	peerpod_bind(mount)
	some storage in storages
	peerpod_volume(storage.mount_point)
	startswith(concat("", [mount.source, "/"]), concat("", [storage.mount_point, "/"]))
	peerpod_plain(mount.source)
}

# The shim's own storages are in the agent's folders.
peerpod_storage(storage) if {
	storage.fstype in peerpod_kinds[storage.driver]
	peerpod_fresh(storage)
	startswith(storage.mount_point, "/run/kata-containers/")
	peerpod_plain(storage.mount_point)
}

# A volume that is a disk of the VM.
peerpod_storage(storage) if {
	storage.driver == "blk"
	startswith(storage.source, "/dev/")
	peerpod_plain(storage.source)
	peerpod_fresh(storage)
	peerpod_volume(storage.mount_point)
}

# A volume that is a share: the agent's handler of this name mounts any file system.
peerpod_storage(storage) if {
	storage.driver == "virtio-fs"
	storage.fstype in {"cifs", "nfs", "nfs4"}
	peerpod_fresh(storage)
	peerpod_volume(storage.mount_point)
}

# A share that the guest has mounted, shown at the place of the same volume.
peerpod_storage(storage) if {
	storage.driver == "virtio-fs"
	storage.fstype == "bind"
	every option in storage.options { option in {"bind", "ro"} }
	peerpod_volume(storage.mount_point)
	storage.source == concat("", [peerpod_shares, trim_prefix(storage.mount_point, peerpod_volumes)])
}

# What is mounted is what the storage says, and not a folder of the VM or a mount that there is: with these options the
# kernel looks at nothing else.
peerpod_fresh(storage) if {
	every option in object.get(storage, "options", []) {
		not option in {"bind", "move", "rbind", "remount"}
	}
}

# A volume that is a raw device.
peerpod_device(device) if {
	device.type_ == "mmioblk"
	startswith(device.vm_path, "/dev/")
	peerpod_plain(device.vm_path)
}

# A volume's folder, and not what is above or below it.
peerpod_volume(path) if {
	startswith(path, peerpod_volumes)
	id := trim_prefix(path, peerpod_volumes)
	id != ""
	id != "."
	id != ".."
	not contains(id, "/")
}

# A path that stays below where it begins.
peerpod_plain(path) if {
	not contains(path, "/../")
	not endswith(path, "/..")
}

# The mark that gives a container the VM's GPUs, which only this one may be.
peerpod_annotation(key, _) if key != "cdi.k8s.io/peer-pods"

peerpod_annotation("cdi.k8s.io/peer-pods", value) if {
	every device in split(value, ",") { startswith(device, "nvidia.com/gpu=") }
}

# The VM keeps its own resolv.conf; containers get theirs as a file.
peerpod_sandbox(request) if {
	count(object.get(request, "dns", [])) == 0
	every storage in object.get(request, "storages", []) { peerpod_storage(storage) }
}
