package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/vmware/govmomi/object"
	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25/methods"
	"github.com/vmware/govmomi/vim25/mo"
	"github.com/vmware/govmomi/vim25/types"
	"github.com/vmware/govmomi/vslm"
)

// order is one request of a test.
type order struct {
	Op, Method, Fault, Name, Datastore, Key, Value, Path string
	Made                                                 bool
	Ms                                                   int
}

// ServeHTTP executes an order, and answers with JSON.
func (w *world) ServeHTTP(out http.ResponseWriter, in *http.Request) {
	var wanted order
	err := json.NewDecoder(in.Body).Decode(&wanted)
	var answer any
	if err == nil {
		answer, err = w.execute(in.Context(), wanted)
	}
	if err != nil {
		http.Error(out, err.Error(), http.StatusBadRequest)
		return
	}
	_ = json.NewEncoder(out).Encode(answer)
}

func (w *world) execute(ctx context.Context, wanted order) (any, error) {
	switch wanted.Op {
	case "vms":
		return w.vms(), nil
	case "late":
		fault, err := faultOf(wanted.Fault)
		if err != nil {
			return nil, err
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		w.late[wanted.Method] = append(w.late[wanted.Method], lateFault{fault, wanted.Made})
		return nil, nil
	case "heal":
		w.mu.Lock()
		defer w.mu.Unlock()
		w.late, w.boot = map[string][]lateFault{}, 0
		simulator.TaskDelay.Delay = 0
		return nil, nil
	case "task-time":
		simulator.TaskDelay.Delay = wanted.Ms
		return nil, nil
	case "boot-time":
		w.mu.Lock()
		defer w.mu.Unlock()
		w.boot = time.Duration(wanted.Ms) * time.Millisecond
		return nil, nil
	case "disk":
		return w.disk(ctx, wanted)
	case "exists":
		_, err := os.Stat(w.file(wanted.Path))
		return err == nil, nil
	case "write":
		file := w.file(wanted.Path)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			return nil, err
		}
		return nil, os.WriteFile(file, []byte(wanted.Value), 0o600)
	case "set":
		vm, err := w.vm(wanted.Name)
		if err == nil {
			w.reconfigure(vm.Self, types.VirtualMachineConfigSpec{
				ExtraConfig: []types.BaseOptionValue{&types.OptionValue{Key: wanted.Key, Value: wanted.Value}},
			})
		}
		return nil, err
	case "power-off":
		return nil, w.run(wanted.Name, (*object.VirtualMachine).PowerOff)
	case "snapshot":
		return nil, w.run(wanted.Name, func(vm *object.VirtualMachine, ctx context.Context) (*object.Task, error) {
			return vm.CreateSnapshot(ctx, "by hand", "", false, false)
		})
	case "remove-snapshots":
		return nil, w.run(wanted.Name, func(vm *object.VirtualMachine, ctx context.Context) (*object.Task, error) {
			return vm.RemoveAllSnapshot(ctx, nil)
		})
	case "most-clones":
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.most, nil
	case "pool":
		return nil, w.pool(ctx, wanted.Name)
	case "copy":
		return nil, w.run(wanted.Name, func(vm *object.VirtualMachine, ctx context.Context) (*object.Task, error) {
			return w.copy(ctx, vm, wanted.Value)
		})
	case "attach":
		return nil, w.attach(ctx, wanted)
	case "destroy":
		return nil, w.run(wanted.Name, func(vm *object.VirtualMachine, ctx context.Context) (*object.Task, error) {
			return vm.Destroy(ctx)
		})
	case "expire":
		return nil, w.expire(ctx)
	}
	return nil, fmt.Errorf("no order %q", wanted.Op)
}

// run runs a task of a machine, and waits for its end.
func (w *world) run(name string, start func(*object.VirtualMachine, context.Context) (*object.Task, error)) error {
	vm, err := w.vm(name)
	if err != nil {
		return err
	}
	task, err := start(object.NewVirtualMachine(w.client, vm.Self), context.Background())
	if err != nil {
		return err
	}
	return task.Wait(context.Background())
}

// attach adds a plain disk to a machine.
func (w *world) attach(ctx context.Context, wanted order) error {
	vm, err := w.vm(wanted.Name)
	if err != nil {
		return err
	}
	devices := object.VirtualDeviceList(vm.Config.Hardware.Device)
	controller, err := devices.FindDiskController("")
	if err != nil {
		return err
	}
	disk := devices.CreateDisk(controller, w.datastore(strings.TrimPrefix(strings.Split(wanted.Path, "]")[0], "[")).Self, wanted.Path)
	return object.NewVirtualMachine(w.client, vm.Self).AddDevice(ctx, disk)
}

// pool makes a resource pool in that of the cluster.
func (w *world) pool(ctx context.Context, name string) error {
	for _, one := range w.registry.All("ResourcePool") {
		if pool := one.(mo.Entity).Entity(); pool.Name == "Resources" {
			_, err := object.NewResourcePool(w.client, one.Reference()).Create(ctx, name, types.DefaultResourceConfigSpec())
			return err
		}
	}
	return fmt.Errorf("no resource pool")
}

// copy clones a machine, with its variables, into its folder.
func (w *world) copy(ctx context.Context, vm *object.VirtualMachine, name string) (*object.Task, error) {
	of := w.registry.Get(vm.Reference()).(*simulator.VirtualMachine)
	return vm.Clone(ctx, object.NewFolder(w.client, *of.Parent), name, types.VirtualMachineCloneSpec{
		Location: types.VirtualMachineRelocateSpec{Pool: of.ResourcePool},
		Config:   &types.VirtualMachineConfigSpec{ExtraConfig: of.Config.ExtraConfig},
	})
}

// seen is a machine as a test sees it.
type seen struct {
	Name, Folder, Power, Host, Pool, Datastore, Annotation string
	Vcpus                                                  int32
	Memory                                                 int32
	Extra                                                  map[string]string
	Disks, Nics                                            []string
	Console                                                string
}

func (w *world) vms() []seen {
	all := []seen{}
	locking := &simulator.Context{}
	for _, one := range w.registry.All("VirtualMachine") {
		vm := one.(*simulator.VirtualMachine)
		w.registry.WithLock(locking, vm, func() { all = append(all, w.see(vm)) })
	}
	return all
}

func (w *world) see(vm *simulator.VirtualMachine) seen {
	name := func(ref *types.ManagedObjectReference) string {
		if ref == nil {
			return ""
		}
		if entity, ok := w.registry.Get(*ref).(mo.Entity); ok {
			return entity.Entity().Name
		}
		return ref.Value
	}
	one := seen{
		Name: vm.Name, Folder: name(vm.Parent), Power: string(vm.Runtime.PowerState), Host: name(vm.Runtime.Host),
		Pool: name(vm.ResourcePool), Annotation: vm.Config.Annotation, Vcpus: vm.Config.Hardware.NumCPU,
		Memory: vm.Config.Hardware.MemoryMB, Extra: map[string]string{}, Disks: []string{}, Nics: []string{},
		Datastore: strings.TrimPrefix(strings.Split(vm.Config.Files.VmPathName, "]")[0], "["),
	}
	for _, option := range vm.Config.ExtraConfig {
		value := option.GetOptionValue()
		one.Extra[value.Key] = fmt.Sprint(value.Value)
	}
	for _, device := range vm.Config.Hardware.Device {
		switch device := device.(type) {
		case *types.VirtualDisk:
			one.Disks = append(one.Disks, backing(device))
		case types.BaseVirtualEthernetCard:
			switch network := device.GetVirtualEthernetCard().Backing.(type) {
			case *types.VirtualEthernetCardNetworkBackingInfo:
				one.Nics = append(one.Nics, network.DeviceName)
			case *types.VirtualEthernetCardDistributedVirtualPortBackingInfo:
				group := types.ManagedObjectReference{Type: "DistributedVirtualPortgroup", Value: network.Port.PortgroupKey}
				one.Nics = append(one.Nics, name(&group))
			}
		case *types.VirtualSerialPort:
			if file, ok := device.Backing.(*types.VirtualSerialPortFileBackingInfo); ok {
				one.Console = file.FileName
			}
		}
	}
	return one
}

func (w *world) vm(name string) (*simulator.VirtualMachine, error) {
	for _, one := range w.registry.All("VirtualMachine") {
		if vm := one.(*simulator.VirtualMachine); vm.Name == name {
			return vm, nil
		}
	}
	return nil, fmt.Errorf("no machine %s", name)
}

func (w *world) datastore(name string) *simulator.Datastore {
	for _, one := range w.registry.All("Datastore") {
		if datastore := one.(*simulator.Datastore); datastore.Name == name {
			return datastore
		}
	}
	return nil
}

// file returns the place of a datastore's file, like `[LocalDS_0] folder/file`, on this machine.
func (w *world) file(path string) string {
	name, rest, _ := strings.Cut(strings.TrimPrefix(path, "["), "] ")
	datastore := w.datastore(name)
	if datastore == nil {
		return ""
	}
	return filepath.Join(strings.TrimPrefix(datastore.Info.GetDatastoreInfo().Url, "file://"), rest)
}

func (w *world) remove(path string) {
	if file := w.file(path); file != "" {
		_ = os.Remove(file)
		_ = os.Remove(strings.TrimSuffix(file, ".vmdk") + "-flat.vmdk")
	}
}

// clear removes the files in a folder of a datastore that are no disks, and then the folder if it is empty.
func (w *world) clear(path string) {
	folder := w.file(path)
	files, _ := os.ReadDir(folder)
	for _, file := range files {
		if !strings.HasSuffix(file.Name(), ".vmdk") {
			_ = os.Remove(filepath.Join(folder, file.Name()))
		}
	}
	_ = os.Remove(folder)
}

// disk makes a disk: a first-class one with a name, or a plain file with a path.
func (w *world) disk(ctx context.Context, wanted order) (any, error) {
	if wanted.Path != "" {
		datacenter := w.registry.Any("Datacenter").Reference()
		task, err := object.NewVirtualDiskManager(w.client).CreateVirtualDisk(
			ctx, wanted.Path, object.NewDatacenter(w.client, datacenter),
			&types.FileBackedVirtualDiskSpec{CapacityKb: 1024})
		if err != nil {
			return nil, err
		}
		return wanted.Path, task.Wait(ctx)
	}
	task, err := vslm.NewObjectManager(w.client).CreateDisk(ctx, types.VslmCreateSpec{
		Name: wanted.Name, CapacityInMB: 1,
		BackingSpec: &types.VslmCreateSpecDiskFileBackingSpec{
			VslmCreateSpecBackingSpec: types.VslmCreateSpecBackingSpec{Datastore: w.datastore(wanted.Datastore).Self},
		},
	})
	if err != nil {
		return nil, err
	}
	info, err := task.WaitForResult(ctx)
	if err != nil {
		return nil, err
	}
	made := info.Result.(types.VStorageObject)
	file := made.Config.Backing.(*types.BaseConfigInfoDiskFileBackingInfo).FilePath
	return map[string]string{"id": made.Config.Id.Id, "path": file}, nil
}

// expire ends all sessions but that of this program.
func (w *world) expire(ctx context.Context) error {
	manager := *w.client.ServiceContent.SessionManager
	var all mo.SessionManager
	if err := object.NewCommon(w.client, manager).Properties(ctx, manager, []string{"sessionList", "currentSession"}, &all); err != nil {
		return err
	}
	for _, session := range all.SessionList {
		if all.CurrentSession != nil && session.Key == all.CurrentSession.Key {
			continue
		}
		_, err := methods.TerminateSession(ctx, w.client, &types.TerminateSession{This: manager, SessionId: []string{session.Key}})
		if err != nil {
			return err
		}
	}
	return nil
}
