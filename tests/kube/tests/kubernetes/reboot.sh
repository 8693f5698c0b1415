#!/usr/bin/env bash
# Does to the node ($1: its folder) what a reboot does. The programs have been killed; here their children end, and what is
# in memory is gone: mounts, sockets, network namespaces, rules.
set -u
folder=$1
for pattern in containerd-shim-kata containerd-shim-runc-v2; do pkill -KILL -f "$pattern"; done
mounts() { awk -v folder="$folder/" '{ if (index($5, folder) == 1) print $5 }' /proc/self/mountinfo; }
for part in containerd/state kubelet/pods run; do
    mounts | grep "^$folder/$part/" | sort -r | xargs -r -n 1 umount -l
done
set -e
find "$folder/containerd/state" "$folder/run" -mindepth 1 -delete
find /run/netns -type f -name 'cni-*' | while read -r namespace; do umount -l "$namespace" && rm "$namespace"; done
ip link delete cni0
nft flush ruleset
