// One binary for everything of Kubernetes that the tests need beside etcd, so that it is linked once:
// the API server, the controller manager, kubectl and helm, chosen by the first argument.
package main

import (
	"fmt"
	"os"

	helm "helm.sh/helm/v4/pkg/cmd"
	"k8s.io/component-base/cli"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
)

func main() {
	role := ""
	if len(os.Args) > 1 {
		role = os.Args[1]
		os.Args = append([]string{role}, os.Args[2:]...)
	}
	switch role {
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-controller-manager":
		os.Exit(cli.Run(controllers.NewControllerManagerCommand()))
	case "kubectl":
		if err := cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()); err != nil {
			util.CheckErr(err)
		}
	case "helm":
		command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
		if err == nil {
			err = command.Execute()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "helm:", err)
			os.Exit(1)
		}
	default:
		fmt.Fprintln(os.Stderr, "usage: kube-server kube-apiserver|kube-controller-manager|kubectl|helm [ARGUMENTS]")
		os.Exit(2)
	}
}
