{{/* What the schema cannot say: fails with a line that names the value; prints nothing. */}}
{{- define "lockstep.check" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 }}{{ $at := printf "cells[%s]" $cell.name }}
{{- if gt (len $cell.prefix) 40 }}
  {{- fail (printf "%s.name: with the release's name %q has more than 40 characters; set fullnameOverride" $at $cell.prefix) }}
{{- end }}
{{- include "lockstep.checkImages" (list $root $at $cell) }}
{{- include "lockstep.checkModel" (list $root $at $cell.model) }}
{{- include "lockstep.checkTls" (list $at $cell.tls) }}
{{- if and $cell.clientKeys.testSecret (not $cell.clientKeys.secret) }}
  {{- fail (printf "%s.clientKeys.testSecret: needs clientKeys.secret" $at) }}
{{- end }}
{{- if and $cell.clientCa.testSecret (not $cell.clientCa.secret) }}
  {{- fail (printf "%s.clientCa.testSecret: needs clientCa.secret" $at) }}
{{- end }}
{{- if and $cell.clientCa.secret $cell.tls.insecure }}
  {{- fail (printf "%s.clientCa.secret: cannot be used with tls.insecure" $at) }}
{{- end }}
{{- include "lockstep.checkWorkers" (list $root $at $cell) }}
{{- include "lockstep.checkTokenizer" (list $at $cell.tokenizer) }}
{{- end }}

{{- define "lockstep.checkTokenizer" -}}
{{- $at := printf "%s.tokenizer" (index . 0) }}{{ $tokenizer := index . 1 }}
{{- if gt (int $tokenizer.autoscaling.minReplicas) (int $tokenizer.autoscaling.maxReplicas) }}
  {{- fail (printf "%s.autoscaling.minReplicas: is above maxReplicas" $at) }}
{{- end }}
{{- if and $tokenizer.ingress.hosts (not $tokenizer.http.enabled) }}
  {{- fail (printf "%s.ingress.hosts: needs http.enabled: true" $at) }}
{{- end }}
{{- if and $tokenizer.httpRoute.parentRefs (not $tokenizer.http.enabled) }}
  {{- fail (printf "%s.httpRoute.parentRefs: needs http.enabled: true" $at) }}
{{- end }}
{{- /* A gateway takes one of two routes of one name: the specification of GRPCRoute. */}}
{{- range $host := $tokenizer.httpRoute.hostnames }}
  {{- if has $host $tokenizer.grpcRoute.hostnames }}
    {{- fail (printf "%s.httpRoute.hostnames: %s is in grpcRoute.hostnames too" $at $host) }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Fails where a label would take the place of one that the chart gives; prints nothing. */}}
{{- define "lockstep.checkLabels" -}}
{{- range $name, $_ := . }}
  {{- if or (hasPrefix "lockstep" $name) (hasPrefix "app.kubernetes.io/" $name) (eq $name "helm.sh/chart") }}
    {{- fail (printf "labels: %s is given by the chart" $name) }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "lockstep.checkImages" -}}
{{- $images := (index . 0).Values.images }}{{ $at := index . 1 }}{{ $cell := index . 2 }}
{{- range $role := list "tokenizer" "scheduler" "workers" }}
  {{- $image := (get $cell $role).image }}
  {{- if and $image.digest $image.tag }}
    {{- fail (printf "%s.%s.image.tag: cannot be used with image.digest; set one of them" $at $role) }}
  {{- end }}
  {{- if and (not $images.registry) (ne $images.pullPolicy "Never") (not (regexMatch "^([^/]*[.:][^/]*|localhost)/" $image.name)) }}
    {{- fail (printf "images.registry: is required: without it %s is an image of Docker Hub (%s.%s.image.name may name a registry, and pullPolicy Never needs none)" $image.name $at $role) }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "lockstep.checkModel" -}}
{{- $root := index . 0 }}{{ $at := index . 1 }}{{ $model := index . 2 }}
{{- $sources := list }}
{{- range $name := list "pvc" "hostPath" "image" }}{{ if get $model $name }}{{ $sources = append $sources $name }}{{ end }}{{ end }}
{{- $download := $model.download }}
{{- if $download.repository }}{{ $sources = append $sources "download.repository" }}{{ end }}
{{- if ne (len $sources) 1 }}
  {{- fail (printf "%s.model: exactly one of pvc, hostPath, image and download.repository must be set, not %d" $at (len $sources)) }}
{{- end }}
{{- if and $download.repository (not $download.commit) }}
  {{- fail (printf "%s.model.download.commit: is required with download.repository, so that all pods have the same files" $at) }}
{{- end }}
{{- if and $download.repository $model.path }}
  {{- fail (printf "%s.model.path: cannot be used with download.repository, which says where the model is" $at) }}
{{- end }}
{{- if and $download.nodePath (not $download.repository) }}
  {{- fail (printf "%s.model.download.nodePath: needs download.repository; hostPath takes a model that the nodes have" $at) }}
{{- end }}
{{- if and $model.image (semverCompare "<1.33-0" $root.Capabilities.KubeVersion.Version) }}
  {{- fail (printf "%s.model.image: needs Kubernetes 1.33 or later" $at) }}
{{- end }}
{{- end }}

{{- define "lockstep.checkTls" -}}
{{- $at := index . 0 }}{{ $tls := index . 1 }}
{{- $given := list }}
{{- range $role := list "tokenizer" "scheduler" "worker" }}
  {{- if get $tls.secrets $role }}{{ $given = append $given $role }}{{ end }}
{{- end }}
{{- if $tls.insecure }}
  {{- if or $given $tls.issuer.name $tls.trustDomain }}
    {{- fail (printf "%s.tls.insecure: cannot be used with issuer, secrets or trustDomain" $at) }}
  {{- end }}
{{- else }}
  {{- if not $tls.trustDomain }}
    {{- fail (printf "%s.tls.trustDomain: is required, unless tls.insecure is true" $at) }}
  {{- end }}
  {{- if and $tls.issuer.name $given }}
    {{- fail (printf "%s.tls.secrets: cannot be used with tls.issuer.name" $at) }}
  {{- end }}
  {{- if and (not $tls.issuer.name) (ne (len $given) 3) }}
    {{- fail (printf "%s.tls: needs issuer.name, or secrets for tokenizer, scheduler and worker" $at) }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "lockstep.checkWorkers" -}}
{{- $root := index . 0 }}{{ $at := printf "%s.workers" (index . 1) }}{{ $cell := index . 2 }}{{ $workers := $cell.workers }}
{{- $download := $cell.model.download }}
{{- if and $download.repository (not $download.nodePath) (eq $download.accessMode "ReadWriteOnce") (gt (int $workers.nodes) 1) }}
  {{- fail (printf "%s.nodes: needs model.download.accessMode ReadWriteMany, since one node mounts a volume with ReadWriteOnce" $at) }}
{{- end }}
{{- if mod $workers.ranks (int $workers.nodes) }}
  {{- fail (printf "%s.nodes: %d nodes cannot share the %d ranks of a failure domain evenly" $at (int $workers.nodes) (int $workers.ranks)) }}
{{- end }}
{{- if and $workers.coupled (mod (int $workers.ranksPerNode) (int $workers.tp)) }}
  {{- fail (printf "%s.nodes: the %d ranks of a node are no multiple of tp, and coupled groups cannot be split" $at (int $workers.ranksPerNode)) }}
{{- end }}
{{- if and $workers.onGpu (gt (int $workers.ranksPerNode) (int $workers.gpu.perNode)) }}
  {{- $isSplit := gt (int $workers.tp) (int $workers.gpu.perNode) }}
  {{- fail (printf "%s.%s: the %d ranks of a pod are more than the %d GPUs of a node (gpu.perNode)" $at (ternary "tp" "nodes" $isSplit) (int $workers.ranksPerNode) (int $workers.gpu.perNode)) }}
{{- end }}
{{- if $workers.autoscaling.enabled }}
  {{- if or $workers.coupled (gt (int $workers.nodes) 1) }}
    {{- fail (printf "%s.autoscaling.enabled: needs a failure domain that is one pod: nodes 1, and no ep with dp above 1" $at) }}
  {{- end }}
  {{- if eq $cell.scheduler.discovery "static" }}
    {{- fail (printf "%s.autoscaling.enabled: needs scheduler.discovery dns or kubernetes" $at) }}
  {{- end }}
{{- end }}
{{- $kind := ternary "StatefulSets" $workers.kind $workers.setPerDomain }}
{{- if and $workers.liveKind (ne $workers.liveKind $kind) (not $workers.replaceKind) }}
  {{- fail (printf "%s: a %s would take the place of the %s that runs, and all workers would end first: add a second cell instead, or set workers.replaceKind: true" $at $kind $workers.liveKind) }}
{{- end }}
{{- if and $workers.coupled (ne $cell.scheduler.discovery "static") }}
  {{- fail (printf "%s.ep: with dp above 1 needs scheduler.discovery static" $at) }}
{{- end }}
{{- if and $workers.gpu.resource $workers.gpu.deviceClass }}
  {{- fail (printf "%s.gpu.deviceClass: cannot be used with gpu.resource; set that to \"\"" $at) }}
{{- end }}
{{- if and $workers.gpu.deviceClass (semverCompare "<1.34-0" $root.Capabilities.KubeVersion.Version) }}
  {{- fail (printf "%s.gpu.deviceClass: needs Kubernetes 1.34 or later" $at) }}
{{- end }}
{{- end }}
