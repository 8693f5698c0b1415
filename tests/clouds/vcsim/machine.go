package main

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/vmware/govmomi/object"
	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25"
	"github.com/vmware/govmomi/vim25/methods"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"
)

// world is the simulator with the faults that a test sets.
type world struct {
	registry *simulator.Registry
	client   *vim25.Client
	mu       sync.Mutex
	late     map[string][]lateFault
	// Sessions that have a machine of this program.
	wrapped map[types.ManagedObjectReference][]*simulator.Registry
	// Time from the power-on until the guest has set its address; below 0: it never does.
	boot time.Duration
	// Number of machines that got an address.
	addresses atomic.Uint32
	// Tasks of clones, and the most of them that ran at the same time.
	clones []*simulator.Task
	most   int
}

// lateFault is the end of a task that was accepted.
type lateFault struct {
	fault types.BaseMethodFault
	// Whether a clone is made, but not powered on.
	made bool
}

// machine is a virtual machine with behaviour that the simulator lacks.
type machine struct {
	*simulator.VirtualMachine
	world *world
}

// faultOf returns a fault by the name of its type.
func faultOf(name string) (types.BaseMethodFault, error) {
	kind, ok := types.TypeFunc()(name)
	if !ok {
		return nil, fmt.Errorf("no fault %s", name)
	}
	fault, ok := reflect.New(kind).Interface().(types.BaseMethodFault)
	if !ok {
		return nil, fmt.Errorf("%s is no fault", name)
	}
	return fault, nil
}

// next returns the fault of the next task of a method.
func (w *world) next(method string) *lateFault {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := w.late[method]
	if len(all) == 0 {
		return nil
	}
	w.late[method] = all[1:]
	return &all[0]
}

// failed returns a task of this method that fails.
func (m *machine) failed(ctx *simulator.Context, method string) (types.ManagedObjectReference, bool) {
	late := m.world.next(method)
	if late == nil {
		return types.ManagedObjectReference{}, false
	}
	task := simulator.CreateTask(m.VirtualMachine, "fail", func(*simulator.Task) (types.AnyType, types.BaseMethodFault) {
		return nil, late.fault
	})
	return task.Run(ctx), true
}

// after runs a function when a task has succeeded.
func (m *machine) after(ctx *simulator.Context, task types.ManagedObjectReference, then func(*simulator.Task)) {
	running := ctx.Map.Get(task).(*simulator.Task)
	go func() {
		running.Wait()
		if running.Info.State == types.TaskInfoStateSuccess {
			then(running)
		}
	}()
}

// CloneVMTask may fail late, or leave a machine that is not powered on. It keeps the annotation.
func (m *machine) CloneVMTask(ctx *simulator.Context, req *types.CloneVM_Task) soap.HasFault {
	if late := m.world.next("CloneVM_Task"); late != nil {
		task := simulator.CreateTask(m.VirtualMachine, "cloneVm", func(*simulator.Task) (types.AnyType, types.BaseMethodFault) {
			if late.made {
				req.Spec.PowerOn = false
				made := m.VirtualMachine.CloneVMTask(ctx, req).(*methods.CloneVM_TaskBody)
				ctx.Map.Get(made.Res.Returnval).(*simulator.Task).Wait()
			}
			return nil, late.fault
		})
		return &methods.CloneVM_TaskBody{Res: &types.CloneVM_TaskResponse{Returnval: task.Run(ctx)}}
	}
	body := m.VirtualMachine.CloneVMTask(ctx, req).(*methods.CloneVM_TaskBody)
	if body.Res != nil {
		m.world.count(ctx.Map.Get(body.Res.Returnval).(*simulator.Task))
		m.after(ctx, body.Res.Returnval, func(task *simulator.Task) {
			clone := task.Info.Result.(types.ManagedObjectReference)
			if req.Spec.Config != nil && req.Spec.Config.Annotation != "" {
				m.world.reconfigure(clone, types.VirtualMachineConfigSpec{Annotation: req.Spec.Config.Annotation})
			}
			if req.Spec.PowerOn {
				m.world.boots(clone)
			}
		})
	}
	return body
}

// count records how many clones run.
func (w *world) count(task *simulator.Task) {
	w.mu.Lock()
	defer w.mu.Unlock()
	running := []*simulator.Task{task}
	for _, one := range w.clones {
		if one.Info.State == types.TaskInfoStateRunning || one.Info.State == types.TaskInfoStateQueued {
			running = append(running, one)
		}
	}
	w.clones = running
	w.most = max(w.most, len(running))
}

// PowerOnVMTask may fail late.
func (m *machine) PowerOnVMTask(ctx *simulator.Context, req *types.PowerOnVM_Task) soap.HasFault {
	if task, ok := m.failed(ctx, "PowerOnVM_Task"); ok {
		return &methods.PowerOnVM_TaskBody{Res: &types.PowerOnVM_TaskResponse{Returnval: task}}
	}
	body := m.VirtualMachine.PowerOnVMTask(ctx, req)
	if on, ok := body.(*methods.PowerOnVM_TaskBody); ok && on.Res != nil {
		m.after(ctx, on.Res.Returnval, func(*simulator.Task) { m.world.boots(m.Self) })
	}
	return body
}

// PowerOffVMTask may fail late.
func (m *machine) PowerOffVMTask(ctx *simulator.Context, req *types.PowerOffVM_Task) soap.HasFault {
	if task, ok := m.failed(ctx, "PowerOffVM_Task"); ok {
		return &methods.PowerOffVM_TaskBody{Res: &types.PowerOffVM_TaskResponse{Returnval: task}}
	}
	return m.VirtualMachine.PowerOffVMTask(ctx, req)
}

// ReconfigVMTask may fail late.
func (m *machine) ReconfigVMTask(ctx *simulator.Context, req *types.ReconfigVM_Task) soap.HasFault {
	if task, ok := m.failed(ctx, "ReconfigVM_Task"); ok {
		return &methods.ReconfigVM_TaskBody{Res: &types.ReconfigVM_TaskResponse{Returnval: task}}
	}
	return m.VirtualMachine.ReconfigVMTask(ctx, req)
}

// boots makes the guest set its address, as the agent in a machine does.
func (w *world) boots(vm types.ManagedObjectReference) {
	w.mu.Lock()
	boot := w.boot
	w.mu.Unlock()
	if boot < 0 {
		return
	}
	time.Sleep(boot)
	number := w.addresses.Add(1)
	address := fmt.Sprintf("10.%d.%d.%d", number>>16&255, number>>8&255, number&255)
	w.reconfigure(vm, types.VirtualMachineConfigSpec{
		ExtraConfig: []types.BaseOptionValue{&types.OptionValue{Key: "guestinfo.local-ipv4", Value: address}},
	})
}

func (w *world) reconfigure(vm types.ManagedObjectReference, spec types.VirtualMachineConfigSpec) {
	task, err := object.NewVirtualMachine(w.client, vm).Reconfigure(context.Background(), spec)
	if err == nil {
		_ = task.Wait(context.Background())
	}
}

// fcd returns a first-class disk and its datastore.
func (m *machine) fcd(ctx *simulator.Context, id types.ID) (*simulator.VStorageObject, types.ManagedObjectReference) {
	for datastore, disks := range ctx.Map.VStorageObjectManager().Catalog() {
		if disk := disks[id]; disk != nil {
			return disk, datastore
		}
	}
	return nil, types.ManagedObjectReference{}
}

func backing(disk *types.VirtualDisk) string {
	if file, ok := disk.Backing.(types.BaseVirtualDeviceFileBackingInfo); ok {
		return file.GetVirtualDeviceFileBackingInfo().FileName
	}
	return ""
}

func (m *machine) disks() []*types.VirtualDisk {
	return disksOf(m.Config.Hardware.Device)
}

func disksOf(devices []types.BaseVirtualDevice) []*types.VirtualDisk {
	var disks []*types.VirtualDisk
	for _, device := range devices {
		if disk, ok := device.(*types.VirtualDisk); ok {
			disks = append(disks, disk)
		}
	}
	return disks
}

// change adds or removes a disk, and waits.
func (m *machine) change(ctx *simulator.Context, operation types.VirtualDeviceConfigSpecOperation, disk *types.VirtualDisk) types.BaseMethodFault {
	body := m.VirtualMachine.ReconfigVMTask(ctx, &types.ReconfigVM_Task{
		This: m.Self,
		Spec: types.VirtualMachineConfigSpec{
			DeviceChange: []types.BaseVirtualDeviceConfigSpec{&types.VirtualDeviceConfigSpec{Operation: operation, Device: disk}},
		},
	}).(*methods.ReconfigVM_TaskBody)
	task := ctx.Map.Get(body.Res.Returnval).(*simulator.Task)
	task.Wait()
	if task.Info.Error != nil {
		return task.Info.Error.Fault
	}
	return nil
}

// AttachDiskTask adds the device of the first-class disk, which the simulator does not.
func (m *machine) AttachDiskTask(ctx *simulator.Context, req *types.AttachDisk_Task) soap.HasFault {
	task := simulator.CreateTask(m.VirtualMachine, "attachDisk", func(*simulator.Task) (types.AnyType, types.BaseMethodFault) {
		if late := m.world.next("AttachDisk_Task"); late != nil {
			return nil, late.fault
		}
		disk, datastore := m.fcd(ctx, req.DiskId)
		if disk == nil || datastore != req.Datastore {
			return nil, &types.NotFound{}
		}
		if len(disk.Config.ConsumerId) > 0 {
			return nil, &types.ResourceInUse{}
		}
		devices := object.VirtualDeviceList(m.Config.Hardware.Device)
		controller, err := devices.FindDiskController("")
		if err != nil {
			return nil, &types.InvalidState{}
		}
		file := disk.Config.Backing.(*types.BaseConfigInfoDiskFileBackingInfo).FilePath
		device := devices.CreateDisk(controller, datastore, file)
		device.VDiskId = &types.ID{Id: req.DiskId.Id}
		id := "6000C29" + strings.ReplaceAll(uuid.NewSHA1(uuid.NameSpaceURL, []byte(req.DiskId.Id)).String(), "-", "")[7:]
		device.Backing.(*types.VirtualDiskFlatVer2BackingInfo).Uuid =
			strings.Join([]string{id[:8], id[8:12], id[12:16], id[16:20], id[20:]}, "-")
		if fault := m.change(ctx, types.VirtualDeviceConfigSpecOperationAdd, device); fault != nil {
			return nil, fault
		}
		disk.Config.ConsumerId = []types.ID{{Id: m.Config.Uuid}}
		return nil, nil
	})
	return &methods.AttachDisk_TaskBody{Res: &types.AttachDisk_TaskResponse{Returnval: task.Run(ctx)}}
}

// DetachDiskTask removes the device of the first-class disk, which the simulator does not.
func (m *machine) DetachDiskTask(ctx *simulator.Context, req *types.DetachDisk_Task) soap.HasFault {
	task := simulator.CreateTask(m.VirtualMachine, "detachDisk", func(*simulator.Task) (types.AnyType, types.BaseMethodFault) {
		if late := m.world.next("DetachDisk_Task"); late != nil {
			return nil, late.fault
		}
		for _, disk := range m.disks() {
			if disk.VDiskId == nil || disk.VDiskId.Id != req.DiskId.Id {
				continue
			}
			if fault := m.change(ctx, types.VirtualDeviceConfigSpecOperationRemove, disk); fault != nil {
				return nil, fault
			}
			if fcd, _ := m.fcd(ctx, req.DiskId); fcd != nil {
				fcd.Config.ConsumerId = nil
			}
			return nil, nil
		}
		return nil, &types.NotFound{}
	})
	return &methods.DetachDisk_TaskBody{Res: &types.DetachDisk_TaskResponse{Returnval: task.Run(ctx)}}
}

// DestroyTask deletes the files of all disks that the machine and its snapshots have, as a vCenter does, and no other disk
// in its folder. The simulator keeps the former outside of the folder, and deletes the whole folder.
func (m *machine) DestroyTask(ctx *simulator.Context, req *types.Destroy_Task) soap.HasFault {
	if task, ok := m.failed(ctx, "Destroy_Task"); ok {
		return &methods.Destroy_TaskBody{Res: &types.Destroy_TaskResponse{Returnval: task}}
	}
	if m.Runtime.PowerState == types.VirtualMachinePowerStatePoweredOff {
		disks := m.disks()
		for _, snapshot := range m.RootSnapshot {
			disks = append(disks, disksOf(ctx.Map.Get(snapshot).(*simulator.VirtualMachineSnapshot).Config.Hardware.Device)...)
		}
		for _, disk := range disks {
			if disk.VDiskId != nil {
				if fcd, datastore := m.fcd(ctx, *disk.VDiskId); fcd != nil {
					delete(ctx.Map.VStorageObjectManager().Catalog()[datastore], fcd.Config.Id)
				}
			}
			m.world.remove(backing(disk))
		}
		m.world.clear(m.Config.Files.LogDirectory)
		m.Config.Files.LogDirectory += "cleared"
	}
	body := m.VirtualMachine.DestroyTask(ctx, req).(*methods.Destroy_TaskBody)
	if body.Res != nil {
		m.after(ctx, body.Res.Returnval, func(*simulator.Task) { m.world.gone(ctx, m.Self) })
	}
	return body
}
