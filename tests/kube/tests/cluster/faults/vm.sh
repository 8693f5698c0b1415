#!/bin/sh
# Runs as pid 1 of a VM of the local provider, and injects the fault that its host name begins with.
name=$(cat /etc/hostname)
case $name in
held-*) while [ ! -e /pause_bundle/go ]; do sleep 0.05; done ;;
late-*) while [ ! -e /pause_bundle/go-late ]; do sleep 0.05; done ;;
esac
case $name in
held-dhcp-*)
    ip address flush dev eth0
    sed -i 's/"version"/"uplink":"on","version"/' /etc/peerpod/guest.json
    ;;
held-clock-*)
    export LD_PRELOAD=/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1
    export FAKETIME=-7000d FAKETIME_DONT_FAKE_MONOTONIC=1 FAKETIME_DISABLE_SHM=1 NO_FAKE_STAT=1
    ;;
disk-*)
    mkdir -p /run/peerpod/images
    mount -t tmpfs -o size=16k tmpfs /run/peerpod/images
    ;;
esac
exec /pause_bundle/peerpod-guest
