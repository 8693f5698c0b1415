package main

import (
	"fmt"

	power "github.com/IBM-Cloud/power-go-client/power/models"
	"github.com/go-openapi/strfmt"
)

func init() {
	for name, model := range map[string]func() any{
		"DHCPServer":        func() any { return new(power.DHCPServerDetail) },
		"DHCPServers":       func() any { return new(power.DHCPServers) },
		"Image":             func() any { return new(power.Image) },
		"Network":           func() any { return new(power.Network) },
		"PVMInstance":       func() any { return new(power.PVMInstance) },
		"PVMInstanceList":   func() any { return new(power.PVMInstanceList) },
		"PVMInstanceCreate": func() any { return new(power.PVMInstanceCreate) },
		"PVMInstances":      func() any { return new(power.PVMInstances) },
		"SystemPools":       func() any { return new(power.SystemPools) },
	} {
		models[name] = model
	}
}

// validated is a model of IBM's. It checks its own values.
type validated interface {
	Validate(formats strfmt.Registry) error
}

// refused adds what a model says of its own values: a required field that is absent, a word that is none of its type's.
func refused(place string, made validated, found *[]string) {
	if err := made.Validate(strfmt.Default); err != nil {
		*found = append(*found, fmt.Sprintf("%s: %v", place, err))
	}
}
