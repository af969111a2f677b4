{{/* What the schema cannot say: fails with a line that names the value; prints nothing. */}}
{{- define "lockstep.check" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 }}{{ $at := printf "cells[%s]" $cell.name }}
{{- if gt (len $cell.prefix) 40 }}
  {{- fail (printf "%s.name: with the release's name %q has more than 40 characters; set fullnameOverride" $at $cell.prefix) }}
{{- end }}
{{- include "lockstep.checkImages" (list $at $cell) }}
{{- include "lockstep.checkModel" (list $root $at $cell.model) }}
{{- include "lockstep.checkTls" (list $at $cell.tls) }}
{{- include "lockstep.checkWorkers" (list $root $at $cell) }}
{{- if gt (int $cell.tokenizer.autoscaling.minReplicas) (int $cell.tokenizer.autoscaling.maxReplicas) }}
  {{- fail (printf "%s.tokenizer.autoscaling.minReplicas: is above maxReplicas" $at) }}
{{- end }}
{{- end }}

{{- define "lockstep.checkImages" -}}
{{- $at := index . 0 }}{{ $cell := index . 1 }}
{{- range $role := list "tokenizer" "scheduler" "workers" }}
  {{- if not (get $cell $role).image.digest }}
    {{- fail (printf "%s.%s.image.digest: is required, as sha256:..." $at $role) }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "lockstep.checkModel" -}}
{{- $root := index . 0 }}{{ $at := index . 1 }}{{ $model := index . 2 }}
{{- $sources := list }}
{{- range $name := list "pvc" "hostPath" "image" }}{{ if get $model $name }}{{ $sources = append $sources $name }}{{ end }}{{ end }}
{{- if $model.download.url }}{{ $sources = append $sources "download.url" }}{{ end }}
{{- if ne (len $sources) 1 }}
  {{- fail (printf "%s.model: exactly one of pvc, hostPath, image and download.url must be set, not %d" $at (len $sources)) }}
{{- end }}
{{- if and $model.download.url (not $model.download.sha256) }}
  {{- fail (printf "%s.model.download.sha256: is required with download.url" $at) }}
{{- end }}
{{- if and $model.download.url (not $model.path) }}
  {{- fail (printf "%s.model.path: is required with download.url" $at) }}
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
{{- if mod $workers.ranks (int $workers.nodes) }}
  {{- fail (printf "%s.nodes: %d nodes cannot share the %d ranks of a failure domain evenly" $at (int $workers.nodes) (int $workers.ranks)) }}
{{- end }}
{{- if and $workers.coupled (mod (int $workers.ranksPerNode) (int $workers.tp)) }}
  {{- fail (printf "%s.nodes: the %d ranks of a node are no multiple of tp, and coupled groups cannot be split" $at (int $workers.ranksPerNode)) }}
{{- end }}
{{- if $workers.autoscaling.enabled }}
  {{- if or $workers.coupled (gt (int $workers.nodes) 1) }}
    {{- fail (printf "%s.autoscaling.enabled: needs a failure domain that is one pod: nodes 1, and no ep with dp above 1" $at) }}
  {{- end }}
  {{- if eq $cell.scheduler.discovery "static" }}
    {{- fail (printf "%s.autoscaling.enabled: needs scheduler.discovery dns or kubernetes" $at) }}
  {{- end }}
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
