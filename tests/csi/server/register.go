package main

import (
	"context"
	"fmt"
	"net"
	"os"

	"google.golang.org/grpc"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// registration answers kubelet, which watches a folder for sockets of plugins.
type registration struct {
	registerapi.UnimplementedRegistrationServer
	info *registerapi.PluginInfo
}

func (r registration) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return r.info, nil
}

func (r registration) NotifyRegistrationStatus(_ context.Context, status *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	fmt.Println("registered:", status.GetPluginRegistered(), status.GetError())
	return &registerapi.RegistrationStatusResponse{}, nil
}

// register serves a driver's registration for as long as it runs, as node-driver-registrar does: NAME, the driver's
// SOCKET, and the socket FOR KUBELET in its folder plugins_registry.
func register(words []string) error {
	if len(words) != 3 {
		return fmt.Errorf("register: %q is not NAME SOCKET FOR-KUBELET", words)
	}
	_ = os.Remove(words[2])
	listener, err := net.Listen("unix", words[2])
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	registerapi.RegisterRegistrationServer(server, registration{info: &registerapi.PluginInfo{
		Type: registerapi.CSIPlugin, Name: words[0], Endpoint: words[1], SupportedVersions: []string{"1.0.0"},
	}})
	return server.Serve(listener)
}
