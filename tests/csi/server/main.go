// A CSI driver to stand behind the wrapper: Kubernetes' own mock driver (controller, node, identity), with every call
// written down, and with a service that no .proto of ours knows, which echoes what it is sent. And kubelet's part of a raw
// volume (kubelet.go), by its first argument.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"
	"k8s.io/kubernetes/test/e2e/storage/drivers/csi-test/mock/service"
)

var (
	endpoint    = flag.String("endpoint", "", "unix socket")
	name        = flag.String("name", "mock.csi.test", "the driver's name")
	calls       = flag.String("calls", "", "file that gets one JSON line per call")
	disable     = flag.Bool("disable-attach", false, "no ControllerPublishVolume")
	attachLimit = flag.Int64("attach-limit", 0, "volumes per node")
	expand      = flag.Bool("node-expand", true, "NodeExpandVolume")
	topology    = flag.Bool("topology", false, "accessible topology")
	mountGroup  = flag.Bool("mount-group", false, "VOLUME_MOUNT_GROUP")
	slow        = flag.Duration("slow", 0, "before each answer of the mock")
	disks       = flag.String("disks", "", "folder that gets one file per volume, with its size")
)

// frame is a message as it is on the wire.
type frame struct{ bytes []byte }

// codec leaves frames as they are.
type codec struct{ encoding.CodecV2 }

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if f, ok := v.(*frame); ok {
		return mem.BufferSlice{mem.SliceBuffer(f.bytes)}, nil
	}
	return c.CodecV2.Marshal(v)
}

func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if f, ok := v.(*frame); ok {
		f.bytes = data.Materialize()
		return nil
	}
	return c.CodecV2.Unmarshal(data, v)
}

// driver refuses unknown mutable parameters and volumes, which the mock takes although it says that it can modify volumes.
type driver struct{ service.Service }

func known(parameters map[string]string) error {
	for key := range parameters {
		if key != "mutableKey" {
			return status.Errorf(codes.InvalidArgument, "mutable parameter %q is not known", key)
		}
	}
	return nil
}

func (d driver) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if err := known(req.GetMutableParameters()); err != nil {
		return nil, err
	}
	for key := range req.GetParameters() {
		if key == "peerpod" {
			return nil, status.Errorf(codes.InvalidArgument, "parameter %q is not known", key)
		}
	}
	answer, err := d.Service.CreateVolume(ctx, req)
	if err == nil {
		err = resize(answer.GetVolume().GetVolumeId(), answer.GetVolume().GetCapacityBytes())
	}
	return answer, err
}

// resize makes the volume's file, or changes its size.
func resize(id string, bytes int64) error {
	if *disks == "" {
		return nil
	}
	file, err := os.OpenFile(filepath.Join(*disks, id), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	return file.Truncate(bytes)
}

func (d driver) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	answer, err := d.Service.ControllerExpandVolume(ctx, req)
	if err == nil {
		err = resize(req.GetVolumeId(), answer.GetCapacityBytes())
	}
	return answer, err
}

func (d driver) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	answer, err := d.Service.DeleteVolume(ctx, req)
	if err == nil && *disks != "" {
		if err := os.Remove(filepath.Join(*disks, req.GetVolumeId())); err != nil && !os.IsNotExist(err) {
			return nil, err
		}
	}
	return answer, err
}

// ControllerPublishVolume says how the disk is recognised, as drivers of real disks do.
func (d driver) ControllerPublishVolume(ctx context.Context, req *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	answer, err := d.Service.ControllerPublishVolume(ctx, req)
	if err == nil {
		answer.PublishContext["serial"] = req.GetVolumeId()
	}
	return answer, err
}

func (d driver) ControllerModifyVolume(ctx context.Context, req *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, status.Error(codes.InvalidArgument, "Volume ID cannot be empty")
	}
	list, err := d.Service.ListVolumes(ctx, &csi.ListVolumesRequest{})
	if err != nil {
		return nil, err
	}
	for _, entry := range list.GetEntries() {
		if entry.GetVolume().GetVolumeId() == req.GetVolumeId() {
			return &csi.ControllerModifyVolumeResponse{}, known(req.GetMutableParameters())
		}
	}
	return nil, status.Error(codes.NotFound, req.GetVolumeId())
}

type recorder struct {
	lock sync.Mutex
	file *os.File
}

func (r *recorder) note(method string, request string, failed error) {
	if r.file == nil {
		return
	}
	line, _ := json.Marshal(map[string]any{
		"method": method, "request": json.RawMessage(request), "code": status.Code(failed).String(),
	})
	r.lock.Lock()
	defer r.lock.Unlock()
	fmt.Fprintf(r.file, "%s\n", line)
}

func (r *recorder) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	select {
	case <-time.After(*slow):
	case <-ctx.Done():
		r.note(info.FullMethod+"#cancelled", "{}", ctx.Err())
		return nil, ctx.Err()
	}
	answer, err := handler(ctx, req)
	text := "{}"
	if message, ok := req.(proto.Message); ok {
		text = protojson.MarshalOptions{}.Format(message)
		if text == "" {
			text = "{}"
		}
	}
	r.note(info.FullMethod, text, err)
	return answer, err
}

// unknown echoes: request metadata beginning with "x-" as header and trailer; each message; and for a method named Fail a
// status with details, for Hang nothing until the caller leaves.
func (r *recorder) unknown(_ any, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	given, _ := metadata.FromIncomingContext(stream.Context())
	back := metadata.MD{}
	for key, values := range given {
		if strings.HasPrefix(key, "x-") {
			back[key] = values
		}
	}
	if deadline, ok := stream.Context().Deadline(); ok {
		back.Set("x-deadline-ms", fmt.Sprint(time.Until(deadline).Milliseconds()))
	}
	if strings.HasSuffix(method, "/Fail") {
		stream.SetTrailer(back)
		failed, err := status.New(codes.ResourceExhausted, "50 % \n of it: ü").WithDetails(wrapperspb.String("the detail"))
		if err != nil {
			return err
		}
		return failed.Err()
	}
	if err := stream.SendHeader(back); err != nil {
		return err
	}
	if strings.HasSuffix(method, "/Hang") {
		r.note(method+"#began", "{}", nil)
		<-stream.Context().Done()
		r.note(method+"#cancelled", "{}", nil)
		return stream.Context().Err()
	}
	stream.SetTrailer(back)
	for {
		var message frame
		if err := stream.RecvMsg(&message); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if err := stream.SendMsg(&message); err != nil {
			return err
		}
	}
}

func main() {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "kubelet":
			fatal(kubelet(os.Args[2:]))
			return
		case "register":
			fatal(register(os.Args[2:]))
			return
		}
	}
	flag.Parse()
	var record recorder
	if *calls != "" {
		file, err := os.OpenFile(*calls, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		fatal(err)
		record.file = file
	}
	mock := driver{service.New(service.Config{
		DriverName:               *name,
		DisableAttach:            *disable,
		AttachLimit:              *attachLimit,
		NodeExpansionRequired:    *expand,
		VolumeMountGroupRequired: *mountGroup,
		EnableTopology:           *topology,
		PermissiveTargetPath:     true,
		IO:                       service.OSDirIO{},
	})}
	server := grpc.NewServer(
		grpc.ForceServerCodecV2(codec{encoding.GetCodecV2("proto")}),
		grpc.UnaryInterceptor(record.unary),
		grpc.UnknownServiceHandler(record.unknown),
	)
	csi.RegisterIdentityServer(server, mock)
	csi.RegisterControllerServer(server, mock)
	csi.RegisterNodeServer(server, mock)
	_ = os.Remove(*endpoint)
	listener, err := net.Listen("unix", *endpoint)
	fatal(err)
	fatal(server.Serve(listener))
}

func fatal(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "csi-driver:", err)
		os.Exit(1)
	}
}
