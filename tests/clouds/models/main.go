// Sends JSON through the models of Microsoft (Azure) and IBM (PowerVS) and back, and names the fields that the models do
// not know.
// Standard input has one {"type": …, "body": …} per line; standard output has one list of the differences per line.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"slices"
	"sort"
	"time"

	compute "github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7"
	network "github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/network/armnetwork/v7"
)

// models makes an empty model of each type.
var models = map[string]func() any{
	"AttachDetachDataDisksRequest":      func() any { return new(compute.AttachDetachDataDisksRequest) },
	"CommunityGalleryImage":             func() any { return new(compute.CommunityGalleryImage) },
	"CommunityGalleryImageVersion":      func() any { return new(compute.CommunityGalleryImageVersion) },
	"Disk":                              func() any { return new(compute.Disk) },
	"DiskList":                          func() any { return new(compute.DiskList) },
	"GalleryImage":                      func() any { return new(compute.GalleryImage) },
	"GalleryImageVersion":               func() any { return new(compute.GalleryImageVersion) },
	"Interface":                         func() any { return new(network.Interface) },
	"InterfaceListResult":               func() any { return new(network.InterfaceListResult) },
	"ListUsagesResult":                  func() any { return new(compute.ListUsagesResult) },
	"PublicIPAddress":                   func() any { return new(network.PublicIPAddress) },
	"PublicIPAddressListResult":         func() any { return new(network.PublicIPAddressListResult) },
	"ResourceSKUsResult":                func() any { return new(compute.ResourceSKUsResult) },
	"RetrieveBootDiagnosticsDataResult": func() any { return new(compute.RetrieveBootDiagnosticsDataResult) },
	"SecurityGroup":                     func() any { return new(network.SecurityGroup) },
	"StorageProfile":                    func() any { return new(compute.StorageProfile) },
	"Subnet":                            func() any { return new(network.Subnet) },
	"TagsObject":                        func() any { return new(network.TagsObject) },
	"VirtualMachine":                    func() any { return new(compute.VirtualMachine) },
	"VirtualMachineInstanceView":        func() any { return new(compute.VirtualMachineInstanceView) },
	"VirtualMachineListResult":          func() any { return new(compute.VirtualMachineListResult) },
	"VirtualMachineUpdate":              func() any { return new(compute.VirtualMachineUpdate) },
}

// misnamed adds the words in a model that are none of their type's.
func misnamed(place string, value reflect.Value, found *[]string) {
	switch value.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !value.IsNil() {
			misnamed(place, value.Elem(), found)
		}
	case reflect.Slice, reflect.Array:
		for number := range value.Len() {
			misnamed(fmt.Sprintf("%s/%d", place, number), value.Index(number), found)
		}
	case reflect.Map:
		for _, key := range value.MapKeys() {
			misnamed(fmt.Sprintf("%s/%v", place, key), value.MapIndex(key), found)
		}
	case reflect.Struct:
		for number := range value.NumField() {
			if field := value.Type().Field(number); field.IsExported() {
				misnamed(place+"/"+field.Name, value.Field(number), found)
			}
		}
	case reflect.String:
		known, is := enums[value.Type()]
		if value.Type() != reflect.TypeFor[string]() && !is {
			*found = append(*found, fmt.Sprintf("%s: this witness lacks the words of %s", place, value.Type()))
		} else if known != nil && !slices.Contains(known, value.String()) {
			*found = append(*found, fmt.Sprintf("%s: %q is none of %q", place, value.String(), known))
		}
	}
}

// same reports whether both are the same; a time may be written in another way.
func same(ours, theirs any) bool {
	if reflect.DeepEqual(ours, theirs) {
		return true
	}
	a, _ := ours.(string)
	b, _ := theirs.(string)
	first, bad := time.Parse(time.RFC3339Nano, a)
	second, worse := time.Parse(time.RFC3339Nano, b)
	return bad == nil && worse == nil && first.Equal(second)
}

// compare adds the places of ours that theirs lacks or has otherwise.
func compare(place string, ours, theirs any, found *[]string) {
	switch ours := ours.(type) {
	case map[string]any:
		theirs, is := theirs.(map[string]any)
		if !is {
			*found = append(*found, place+": is no object in the model")
			return
		}
		for name, value := range ours {
			other, is := theirs[name]
			if !is {
				*found = append(*found, place+"/"+name+": the model does not know it")
				continue
			}
			compare(place+"/"+name, value, other, found)
		}
	case []any:
		theirs, is := theirs.([]any)
		if !is || len(theirs) != len(ours) {
			*found = append(*found, place+": another list in the model")
			return
		}
		for number, value := range ours {
			compare(fmt.Sprintf("%s/%d", place, number), value, theirs[number], found)
		}
	default:
		if !same(ours, theirs) {
			*found = append(*found, place+": the model changes it")
		}
	}
}

// differences returns what the model of this type does not keep of the body.
func differences(kind string, body json.RawMessage) []string {
	model, is := models[kind]
	if !is {
		return []string{kind + ": there is no such model"}
	}
	made := model()
	if err := json.Unmarshal(body, made); err != nil {
		return []string{kind + ": " + err.Error()}
	}
	back, err := json.Marshal(made)
	if err != nil {
		return []string{kind + ": " + err.Error()}
	}
	var ours, theirs any
	if json.Unmarshal(body, &ours) != nil || json.Unmarshal(back, &theirs) != nil {
		return []string{kind + ": no JSON"}
	}
	found := []string{}
	compare(kind, ours, theirs, &found)
	if checked, is := made.(validated); is {
		refused(kind, checked, &found)
	} else {
		misnamed(kind, reflect.ValueOf(made), &found)
	}
	sort.Strings(found)
	return found
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var line struct {
			Type string          `json:"type"`
			Body json.RawMessage `json:"body"`
		}
		found := []string{"a line that is no JSON"}
		if json.Unmarshal(lines.Bytes(), &line) == nil {
			found = differences(line.Type, line.Body)
		}
		answer, _ := json.Marshal(found)
		fmt.Println(string(answer))
	}
}
