// Command vcsim runs govmomi's simulator of a vCenter for one test, with one cluster, two datastores, a template and
// virtual machines of others. It prints one line of JSON (URLs and certificate) and ends with its standard input.
//
// The simulator lacks some behaviour of a vCenter, which machine.go adds. A test controls it by JSON (control.go).
package main

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"

	"github.com/vmware/govmomi"
	"github.com/vmware/govmomi/find"
	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25/mo"
	"github.com/vmware/govmomi/vim25/types"
)

// Account of the tests.
const user, password = "peerpod@vsphere.local", "secret & <safe>"

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "vcsim:", err)
		os.Exit(1)
	}
}

func run() error {
	model := simulator.VPX()
	model.Datastore, model.Machine, model.Host, model.Autostart = 2, 1, 0, false
	defer model.Remove()
	if err := model.Create(); err != nil {
		return err
	}
	service := model.Service
	service.Listen = &url.URL{Host: "127.0.0.1:0", User: url.UserPassword(user, password)}
	if len(os.Args) > 1 && os.Args[1] == "tls" {
		service.TLS = new(tls.Config)
	}
	server := service.NewServer()
	defer server.Close()
	// A property of an object can be read while a task of the object waits.
	simulator.TaskDelay.MethodDelay = map[string]int{"LockHandoff": 0}
	client, err := govmomi.NewClient(context.Background(), server.URL, true)
	if err != nil {
		return err
	}
	world := &world{registry: model.Map(), client: client.Client, late: map[string][]lateFault{},
		wrapped: map[types.ManagedObjectReference][]*simulator.Registry{}}
	if err := world.prepare(context.Background()); err != nil {
		return err
	}
	model.Map().Handler = world.handle
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go func() { _ = http.Serve(listener, world) }()
	// The simulator compares logins with the user in its own copy.
	shown := *server.URL
	shown.User = nil
	said := map[string]string{
		"url": shown.String(), "control": listener.Addr().String(), "user": user, "password": password,
	}
	if service.TLS != nil {
		der := server.Certificate().Raw
		digest := sha256.Sum256(der)
		said["fingerprint"] = hex.EncodeToString(digest[:])
		said["certificate"] = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	}
	if err := json.NewEncoder(os.Stdout).Encode(said); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// prepare makes the template: a machine with a snapshot.
func (w *world) prepare(ctx context.Context) error {
	finder := find.NewFinder(w.client, false)
	datacenter, err := finder.DefaultDatacenter(ctx)
	if err != nil {
		return err
	}
	finder.SetDatacenter(datacenter)
	machine, err := finder.VirtualMachine(ctx, "DC0_C0_RP0_VM0")
	if err != nil {
		return err
	}
	renamed, err := machine.Rename(ctx, "podvm-template")
	if err != nil {
		return err
	}
	if err = renamed.Wait(ctx); err != nil {
		return err
	}
	made, err := machine.CreateSnapshot(ctx, "base", "", false, false)
	if err != nil {
		return err
	}
	if err = made.Wait(ctx); err != nil {
		return err
	}
	return machine.MarkAsTemplate(ctx)
}

// handle gives the simulator a machine that behaves as in a vCenter. The objects of a session come before the others.
func (w *world) handle(ctx *simulator.Context, method *simulator.Method) (mo.Reference, types.BaseMethodFault) {
	vm, ok := ctx.Map.Get(method.This).(*simulator.VirtualMachine)
	if !ok || ctx.Session == nil {
		return nil, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if ctx.Session.Registry.Get(vm.Self) == nil {
		ctx.Session.Registry.Put(&machine{vm, w})
		w.wrapped[vm.Self] = append(w.wrapped[vm.Self], ctx.Session.Registry)
	}
	return nil, nil
}

// gone removes a machine from all sessions.
func (w *world) gone(ctx *simulator.Context, vm types.ManagedObjectReference) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, registry := range w.wrapped[vm] {
		registry.Remove(ctx, vm)
	}
	delete(w.wrapped, vm)
}
