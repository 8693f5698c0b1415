package main

import (
	"fmt"
	"path/filepath"

	"k8s.io/kubernetes/pkg/volume/util/volumepathhandler"
)

// kubelet maps or unmaps a published raw volume for a pod, by the calls that kubelet makes for it (MapBlockVolume and
// UnmapBlockVolume): map TARGET GLOBAL UID FOLDER NAME, unmap GLOBAL UID FOLDER NAME.
func kubelet(words []string) error {
	handler := volumepathhandler.NewBlockVolumePathHandler()
	switch {
	case len(words) == 6 && words[0] == "map":
		target, global, uid, folder, name := words[1], words[2], words[3], words[4], words[5]
		if err := handler.MapDevice(target, global, uid, true); err != nil {
			return err
		}
		if err := handler.MapDevice(target, folder, name, false); err != nil {
			return err
		}
		_, err := handler.AttachFileDevice(filepath.Join(global, uid))
		return err
	case len(words) == 5 && words[0] == "unmap":
		global, uid, folder, name := words[1], words[2], words[3], words[4]
		if err := handler.DetachFileDevice(filepath.Join(global, uid)); err != nil {
			return err
		}
		if err := handler.UnmapDevice(folder, name, false); err != nil {
			return err
		}
		return handler.UnmapDevice(global, uid, true)
	}
	return fmt.Errorf("kubelet: %q is neither map nor unmap", words)
}
