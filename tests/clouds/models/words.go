package main

import (
	"reflect"

	compute "github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/compute/armcompute/v7"
	network "github.com/Azure/azure-sdk-for-go/sdk/resourcemanager/network/armnetwork/v7"
)

// enums holds the values of each type of words. The models themselves accept any text.
var enums = map[reflect.Type][]string{
	// New sizes have no value here.
	reflect.TypeFor[compute.VirtualMachineSizeTypes](): nil,
}

func words[T ~string](values []T) {
	texts := []string{}
	for _, value := range values {
		texts = append(texts, string(value))
	}
	enums[reflect.TypeFor[T]()] = texts
}

func init() {
	words(compute.PossibleArchitectureValues())
	words(compute.PossibleCachingTypesValues())
	words(compute.PossibleDeleteOptionsValues())
	words(compute.PossibleDiskControllerTypesValues())
	words(compute.PossibleDiskCreateOptionValues())
	words(compute.PossibleDiskCreateOptionTypesValues())
	words(compute.PossibleDiskDeleteOptionTypesValues())
	words(compute.PossibleDiskDetachOptionTypesValues())
	words(compute.PossibleDiskStateValues())
	words(compute.PossibleDiskStorageAccountTypesValues())
	words(compute.PossibleGalleryProvisioningStateValues())
	words(compute.PossibleHostCachingValues())
	words(compute.PossibleHyperVGenerationValues())
	words(compute.PossibleHyperVGenerationTypeValues())
	words(compute.PossibleIPVersionsValues())
	words(compute.PossibleNetworkAPIVersionValues())
	words(compute.PossibleOperatingSystemStateTypesValues())
	words(compute.PossibleOperatingSystemTypesValues())
	words(compute.PossiblePublicIPAddressSKUNameValues())
	words(compute.PossiblePublicIPAddressSKUTierValues())
	words(compute.PossiblePublicIPAllocationMethodValues())
	words(compute.PossibleReplicationModeValues())
	words(compute.PossibleResourceSKURestrictionsReasonCodeValues())
	words(compute.PossibleResourceSKURestrictionsTypeValues())
	words(compute.PossibleSecurityEncryptionTypesValues())
	words(compute.PossibleSecurityTypesValues())
	words(compute.PossibleSharedGalleryHostCachingValues())
	words(compute.PossibleStatusLevelTypesValues())
	words(compute.PossibleStorageAccountTypeValues())
	words(compute.PossibleStorageAccountTypesValues())
	words(compute.PossibleVirtualMachineEvictionPolicyTypesValues())
	words(compute.PossibleVirtualMachinePriorityTypesValues())
	words(network.PossibleDeleteOptionsValues())
	words(network.PossibleIPAllocationMethodValues())
	words(network.PossibleIPVersionValues())
	words(network.PossibleNetworkInterfaceNicTypeValues())
	words(network.PossibleProvisioningStateValues())
	words(network.PossiblePublicIPAddressSKUNameValues())
	words(network.PossiblePublicIPAddressSKUTierValues())
}
